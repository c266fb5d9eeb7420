"""For `make docs`: links to files of the repository that are no pages, and the report of a run."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "runs" / "docs" / "report.html"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A link out of docs/ becomes the name of the file: the site does not hold it."""
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"`\1`", markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Put the report of the demo run beside the pages."""
    if not REPORT.exists():
        raise SystemExit(f"{REPORT} is missing: make docs makes it, with maskaq demo --out runs/docs")
    (Path(config["site_dir"]) / "demo-report.html").write_bytes(REPORT.read_bytes())
