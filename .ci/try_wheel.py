"""Has a wheel that was installed generate text, as cibuildwheel runs it: outside the checkout."""

from __future__ import annotations

import json
import subprocess
import sys

from shardnet.model.kernels.library import native_kernels

COMMAND = ["generate", "It was", "--max-tokens", "4", "--json"]
TIMEOUT_S = 300

assert native_kernels() is not None, "the kernels are not in it"
done = subprocess.run(
    [sys.executable, "-P", "-m", "shardnet_cli", *COMMAND],
    stdout=subprocess.PIPE,
    timeout=TIMEOUT_S,
    check=True,
)
assert len(json.loads(done.stdout)["token_ids"]) == 4, done.stdout
