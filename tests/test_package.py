"""The package as it is imported; who may import whom is in pyproject.toml, under `[tool.importlinter]`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import maskaq

SOURCE = Path(maskaq.__file__).parent


def test_the_package_imports_without_a_gpu_and_says_nothing():
    code = (
        "import maskaq, maskaq.cli.main, torch\n"
        "assert not torch.cuda.is_available() and not torch.cuda.is_initialized()\n"
        "assert all(hasattr(maskaq, name) for name in maskaq.__all__)\n"
    )
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(SOURCE.parent)]))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_public_names_exist_and_are_named_once():
    names = maskaq.__all__
    assert names and len(names) == len(set(names))
    assert not [name for name in names if not hasattr(maskaq, name)]
    assert maskaq.__version__.count(".") == 2


def test_the_reference_has_every_public_name_under_a_heading():
    root = Path(__file__).parent.parent
    listed = re.findall(r"^::: maskaq\.(\S+)$", (root / "docs" / "api.md").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(maskaq.__all__)
    assert "show_root_heading: true" in (root / "mkdocs.yml").read_text()
