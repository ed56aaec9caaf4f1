"""Fetch the JavaScript libraries of the dashboard from npm, and write them beside its page.

A page without a build step imports files: names of packages become paths, maps of sources are
dropped, nothing else is changed. NOTICE names each with version, licence and digest. To take
newer versions, change them here and run this; it needs npm.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[1] / "shardnet/api/dashboard/page/vendor"
FILES: Final = {
    "preact@11.2.0": {"dist/preact.mjs": "preact.js", "hooks/dist/hooks.mjs": "hooks.js"},
    "@preact/signals@2.11.4": {"dist/signals.mjs": "signals.js"},
    "@preact/signals-core@1.14.5": {"dist/signals-core.mjs": "signals-core.js"},
    "htm@3.1.1": {"dist/htm.mjs": "htm.js"},
    "marked@18.2.1": {"lib/marked.esm.js": "marked.js"},
}
"""The file of each package that is taken, and what it is called here."""
NAMES: Final = {
    "preact": "preact.js",
    "preact/hooks": "hooks.js",
    "@preact/signals-core": "signals-core.js",
}


def fetch(npm: str, package: str, folder: Path) -> Path:
    """Fetch a package and unpack it; return its folder."""
    packed = subprocess.run(
        [npm, "pack", "--json", package], cwd=folder, check=True, capture_output=True, text=True
    )
    [told] = json.loads(packed.stdout)
    target = folder / package.replace("/", "_")
    with tarfile.open(folder / told["filename"]) as tar:
        tar.extractall(target, filter="data")
    return target / "package"


def as_a_file(source: str) -> str:
    """Let a module import files beside it, where it imported packages."""
    for name, file in NAMES.items():
        source = re.sub(rf'from\s*"{re.escape(name)}"', f'from"./{file}"', source)
    source = re.sub(r"//# sourceMappingURL=.*\s*", "", source)
    return source.rstrip() + "\n"


def main() -> None:
    """Write all files and NOTICE."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--npm", default="npm", help="the program that fetches packages")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    notice = ["The libraries in this folder, from npm, written by scripts/vendor_page.py.", ""]
    licences: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as made:
        for package, files in FILES.items():
            unpacked = fetch(options.npm, package, Path(made))
            licence = json.loads((unpacked / "package.json").read_text())["license"]
            for path, name in files.items():
                text = as_a_file((unpacked / path).read_text(encoding="utf-8"))
                (FOLDER / name).write_text(text, encoding="utf-8")
                digest = hashlib.sha256(text.encode()).hexdigest()
                notice.append(f"{name}  {package}  {licence}  sha256:{digest}")
            text = (unpacked / "LICENSE").read_text(encoding="utf-8").strip()
            licences.setdefault(text, []).append(package)
    for text, packages in licences.items():
        notice += ["", "-" * 80, " ".join(packages), "", text]
    (FOLDER / "NOTICE").write_text("\n".join(notice) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
