"""What the README and docs/ say is so: Python blocks run, links lead somewhere, the layers are those of the code.

A block that begins with three backquotes and `python` runs, unless its first line is `# fragment`. The blocks of a page
are one script, each line at its place in the page, so that a traceback gives the page's line.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from test_layers import LAYERS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
README_LINES = 25
TIMEOUT_S = 120


def script_of(page: Path) -> str:
    """Give the page with everything but its runnable blocks blanked out."""
    kept, lines = [], page.read_text().splitlines()
    inside = runs = False
    for number, line in enumerate(lines):
        fence = line.startswith("```")
        if fence:
            inside = not inside
            runs = inside and line == "```python" and not lines[number + 1].startswith("# fragment")
        kept.append(line if runs and not fence else "")
    assert not inside, f"{page.name}: a block is not closed"
    return "\n".join(kept)


PAGES_WITH_BLOCKS = [page for page in PAGES if script_of(page).strip()]


def test_pages_with_blocks_are_found():
    names = {page.name for page in PAGES_WITH_BLOCKS}
    assert names >= {"README.md", "training.md", "same-bits.md", "data.md", "checkpoints.md", "errors.md", "events.md"}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("page", [page for page in PAGES_WITH_BLOCKS if page != README], ids=lambda page: page.name)
def test_python_blocks_run(fork_ranks, page, ranks, tmp_path, monkeypatch):
    script = tmp_path / f"{page.stem}.py"
    script.write_text("import warnings; warnings.simplefilter('error')\n" + script_of(page))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")  # ranks begin where the test is
    fork_ranks(ranks, script)


def test_the_readmes_script_is_short_and_has_one_digest_with_and_without_ranks(fork_ranks, fork_python, tmp_path):
    (script,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(script.splitlines()) <= README_LINES
    path = tmp_path / "digits.py"
    assert "trainer.epochs(5)" in script
    shorter = script.replace("trainer.epochs(5)", "trainer.epochs(1)")
    path.write_text("import warnings; warnings.simplefilter('error')\n" + shorter)
    alone = fork_python(path)
    assert re.fullmatch("weights sha256: [0-9a-f]{64}", alone[-1])
    assert fork_ranks(2, path).lines()[-1] == alone[-1]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_relative_links_lead_to_files(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors_of(file), f"{page.name} links to {target}, and there is no such heading"


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that a page's headings have where Markdown is shown as GitHub does."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_layers_in_the_architecture_are_those_of_the_code():
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("## Layers")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == LAYERS
    assert {word for word in LAYERS if not re.search(rf"\b{word}\b", section.split("```")[1])} == set()
