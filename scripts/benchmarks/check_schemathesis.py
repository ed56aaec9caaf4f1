"""Have schemathesis send the HTTP server what its OpenAPI document allows, and what it does not.

The bundled model runs in this process, with a small context. A 500 is a bug, and so is an answer
of another form than the document says; 503 and 504 are what a request may ask for, with a deadline
of no seconds. Needs schemathesis; scripts/check_schemathesis installs it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
from collections import Counter
from typing import Any

from shardnet.api.connections import in_process
from shardnet.api.serve.server import endpoints, serving
from shardnet.api.server.app import openapi_document
from shardnet.api.server.settings import Listening, Settings
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.wire.messages.plans import ModelChoice

CONTEXT = 24
MOST = 256
"""Bounds of lengths that are tried."""
CHECKS = "response_schema_conformance,content_type_conformance"
_LINE = re.compile(r"\w+ (\S+) (\d{3}) ")


def main() -> None:
    """Serve, let it send, and print what was answered; end with 1 for what may not be."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/check_schemathesis")
    parser.add_argument("--examples", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    answers: Counter[tuple[str, str]] = Counter()
    code = asyncio.run(_run(arguments, answers))
    for (path, status), n in sorted(answers.items()):
        print(f"{path} {status}: {n}")
    failed = [path for path, status in answers if status == "500"]
    if failed:
        sys.exit(f"error: status 500 at {', '.join(failed)}; the log above says why")
    if code:
        sys.exit("error: schemathesis found answers of another form")
    if not answers:
        sys.exit("error: schemathesis sent nothing")


async def _run(arguments: argparse.Namespace, answers: Counter[tuple[str, str]]) -> int:
    """Return schemathesis' exit code; count the answers by path and status."""

    def log(line: str) -> None:
        if found := _LINE.match(line):
            answers[found[1], found[2]] += 1

    document = without_large_bounds(openapi_document(endpoints()))
    choice = ModelChoice(model=DEFAULT_MODEL_NAME, context=CONTEXT)
    listening = Listening(host="127.0.0.1", port=0, settings=Settings(log=log))
    async with (
        in_process(model=choice, threads=arguments.threads) as client,
        serving(client, listening) as url,
    ):
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".json") as file:
            json.dump(document, file)
            file.flush()
            return await _send(arguments, url, file.name)


async def _send(arguments: argparse.Namespace, url: str, document: str) -> int:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", document, "--url", url),
        *("--checks", CHECKS, "--max-examples", str(arguments.examples)),
        *("--seed", str(arguments.seed), "--workers", "4", "--continue-on-failure"),
        *("--phases", "coverage,fuzzing", "--suppress-health-check", "all"),
    )
    return await process.wait()


def without_large_bounds(schema: Any) -> Any:
    """Leave out of a schema the largest lengths: what breaks them by one would fill the memory."""
    if isinstance(schema, list):
        return [without_large_bounds(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: without_large_bounds(value)
        for key, value in schema.items()
        if not (key in ("maxItems", "maxLength") and isinstance(value, int) and value > MOST)
    }


if __name__ == "__main__":
    main()
