"""Sets up .venv if need be, then lets the bundled model write on over two node processes.

It says what that shows, and what a ring is for.
"""

from __future__ import annotations

import argparse
import json
import subprocess

from set_up import PROGRAMS, PYTHON, ROOT, say, set_up_or_exit

PROMPT = "It was a fine morning in the spring, and Miss Bennet"
COMMAND = [str(PYTHON), "-P", "-m", "shardnet_cli"]


def show(prompt: str, n_tokens: int) -> None:
    """Write over two nodes and over one, and compare."""
    say("Welcome! A small language model, trained on old novels, now goes on from your words.")
    say("Two nodes on this machine share its layers; each token travels round between them.")
    say(f"The prompt: {prompt}")
    ring = rate(2, prompt, n_tokens, is_shown=True)
    say(
        f"That was a ring of two nodes: {ring} tokens per second. The same on one node, to compare:"
    )
    alone = rate(1, prompt, n_tokens, is_shown=False)
    say(f"one node alone: {alone} tokens per second.")
    if alone > ring:
        say("This model is so small that passing tokens on costs more than sharing gains.")
        say("A ring pays for a model that none of your machines has the memory for; shardnet never")
        say("splits one that is faster whole, unless told to, as here.")
    else:
        say("A ring pays, above all, for a model that none of your machines has the memory for.")
    command = (PROGRAMS / "shardnet").relative_to(ROOT)
    say(f"Next: {command} models lists what is on this machine, and README.md goes on from here.")


def rate(n_nodes: int, prompt: str, n_tokens: int, *, is_shown: bool) -> int:
    """Write on over some nodes of this machine; return the tokens per second."""
    sampling = ["--temperature", "0.7", "--top-p", "0.95", "--seed", "7"]
    asked = ["generate", "--local", str(n_nodes), *sampling, "--max-tokens", str(n_tokens), prompt]
    output = None if is_shown else subprocess.DEVNULL
    subprocess.run([*COMMAND, *asked], stdout=output, stderr=output, check=True)
    last = subprocess.run(
        [*COMMAND, "plan", "--last", "--json"], stdout=subprocess.PIPE, check=True
    )
    return round(float(json.loads(last.stdout)["decode_tok_s"]))


def main() -> None:
    """Show it from the prompt of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default=PROMPT, help="what the model goes on from")
    parser.add_argument("--max-tokens", type=int, default=120, help="how much it writes")
    asked = parser.parse_args()
    set_up_or_exit()
    try:
        show(asked.prompt, asked.max_tokens)
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from None  # the command has said why


if __name__ == "__main__":
    main()
