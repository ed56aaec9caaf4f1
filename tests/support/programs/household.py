"""What LiteLLM gets of a household's models; prints one JSON list a line: the model, its answer.

Runs where the package is installed, not beside the tests.
"""

import json
import os

import litellm

ASKED = {"api_base": os.environ["SHARDNET_URL"], "api_key": "none"}

for name in ("coder", "story"):
    talk = [{"role": "user", "content": "Say."}]
    answer = litellm.completion(
        model=f"openai/{name}", messages=talk, max_tokens=12, temperature=0, **ASKED
    )
    print(json.dumps([name, answer.choices[0].message.content]), flush=True)
vector = litellm.embedding(model="openai/notes", input=["a letter"], **ASKED)
print(json.dumps(["notes", len(vector.data[0]["embedding"])]), flush=True)
