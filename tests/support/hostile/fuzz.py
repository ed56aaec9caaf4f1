"""The program of scripts/fuzz: rounds of mutated input, figures of each, and the finds kept."""

from __future__ import annotations

import argparse
import hashlib
import logging
import math
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from support.hostile.attack_node import fuzz_live
from support.hostile.corpus import HOSTILE
from support.hostile.mutate_connections import fuzz_handshakes, fuzz_requests
from support.hostile.mutate_files import fuzz_files, mutated
from support.hostile.receive_frames import Figures, Finding, fuzz_frames
from support.hostile.receive_parts import fuzz_parts

from shardnet.assets import DEFAULT_MODEL_PATH
from shardnet.errors import CheckpointError
from shardnet.tokenizers.tokenizer import Tokenizer

FOUND = HOSTILE / "found"
N_FRAMES = 100_000
N_HANDSHAKES = 20_000
N_REQUESTS = 500
N_FILES = 1_000
N_TOKENIZERS = 50
LIVE_S = 10.0
TEXT = "Ab c<s>é\n"


class Finds:
    """What was found, in a folder of its own."""

    def __init__(self, folder: Path = FOUND) -> None:
        self._folder = folder
        self.n = 0
        self.n_received: Counter[str] = Counter()
        """How many frames, handshakes and requests listeners were sent, by what they are."""

    def keep_frames(self, data: bytes, why: str) -> None:
        """Keep what was received, and say why."""
        name = f"{hashlib.sha256(data).hexdigest()[:12]}.bin"
        self._folder.mkdir(exist_ok=True)
        (self._folder / name).write_bytes(data)
        self._say(name, why)

    def keep_files(self, folder: Path, why: str) -> None:
        """Keep a checkpoint, and say why."""
        name = f"files-{time.time_ns()}"
        shutil.copytree(folder, self._folder / name, dirs_exist_ok=True)
        self._say(name, why)

    def _say(self, name: str, why: str) -> None:
        self.n += 1
        print(f"FOUND {self._folder / name}: {why}", flush=True)


def attack_with_frames(
    seed: int, finds: Finds, attack: Callable[[], Figures], what: str = "frames"
) -> str:
    """Run one attack with frames, or `what` else listeners take, and keep what it finds."""
    try:
        figures = attack()
    except Finding as finding:
        finds.keep_frames(finding.data, f"seed {seed}: {finding}")
        return "ended by a find"
    finds.n_received[what] += figures.n_frames
    for data in figures.slow:
        finds.keep_frames(data, f"seed {seed}: slow")
    pings = f", slowest ping {figures.slowest_ping_s:.2f} s" if figures.n_pings else ""
    return (
        f"{figures.n_frames} {what}, {figures.n_read} read, slowest {figures.slowest_s:.2f} s"
        f"{pings}, {figures.grown_bytes / 2**20:.0f} MiB grown"
    )


def attack_with_tokenizers(n: int, seed: int, finds: Finds) -> str:
    """Load mutated tokenizers; encode and decode with those that load."""
    kinds: Counter[str] = Counter()
    sources = sorted((HOSTILE / "tokenizers").glob("*.json"))
    sources += [DEFAULT_MODEL_PATH / "tokenizer.json"] * len(sources)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(n):
            chance = random.Random(f"{seed}-{number}")
            content = chance.choice(sources).read_bytes()
            (folder / "tokenizer.json").write_bytes(mutated(chance, "tokenizer.json", content))
            kinds[_used(folder, f"seed {seed}-{number}", finds)] += 1
    return f"{n} tokenizers: " + ", ".join(f"{many} {kind}" for kind, many in kinds.most_common())


def _used(folder: Path, where: str, finds: Finds) -> str:
    try:
        with Tokenizer.load(folder) as tokenizer:
            ids = tokenizer.encode(TEXT)
            tokenizer.decode([*ids, *range(10)])
    except CheckpointError:
        return "refused"
    except Exception as error:  # whatever it is, it is what is looked for
        finds.keep_files(folder, f"{where}: {type(error).__name__}: {error}")
        return "found"
    return "used"


def _key(seed: int) -> bytes:
    return random.Random(seed).randbytes(16)


ROUND: dict[str, Callable[[int, Finds], str]] = {
    "frames": lambda n, finds: attack_with_frames(n, finds, lambda: fuzz_frames(N_FRAMES, n)),
    "parts": lambda n, finds: attack_with_frames(
        n, finds, lambda: fuzz_parts(N_FRAMES, n), "parts"
    ),
    "handshakes": lambda n, finds: attack_with_frames(
        n, finds, lambda: fuzz_handshakes(N_HANDSHAKES, n), "handshakes"
    ),
    "requests": lambda n, finds: attack_with_frames(
        n, finds, lambda: fuzz_requests(N_REQUESTS, n), "requests"
    ),
    "files": lambda n, finds: str(fuzz_files(N_FILES, n, finds.keep_files)),
    "tokenizers": lambda n, finds: attack_with_tokenizers(N_TOKENIZERS, n, finds),
    "live": lambda n, finds: attack_with_frames(n, finds, lambda: fuzz_live(LIVE_S, n, None)),
    "live with a key": lambda n, finds: attack_with_frames(
        n, finds, lambda: fuzz_live(LIVE_S, n, _key(n))
    ),
}
LISTENERS = ("frames", "parts", "handshakes", "requests", "live", "live with a key")
"""What is received from strangers and peers, of all that is attacked."""


def main(arguments: Sequence[str]) -> int:
    """Run rounds until the time is over, or enough was received; return 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default 5)")
    parser.add_argument(
        "--frames", type=int, help="only what listeners take: so many frames, handshakes, requests"
    )
    parser.add_argument("--seed", type=int, default=None, help="the first round's seed")
    parser.add_argument("--only", choices=ROUND, nargs="+", help="what to do (default all)")
    asked = parser.parse_args(arguments)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it tells of each bad request
    seed = asked.seed if asked.seed is not None else int(time.time())
    ends, finds, is_over = time.monotonic() + 60 * asked.minutes, Finds(), False
    rounds = asked.only or (LISTENERS if asked.frames else ROUND)
    while not is_over:
        for what in rounds:
            print(f"seed {seed} {what}: {ROUND[what](seed, finds)}", flush=True)
            is_late = asked.frames is None and time.monotonic() > ends
            if is_over := is_late or finds.n_received.total() >= (asked.frames or math.inf):
                break
        seed += 1
    received = ", ".join(f"{n} {what}" for what, n in finds.n_received.items())
    print(f"{finds.n} finds in {received}")
    return 1 if finds.n else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
