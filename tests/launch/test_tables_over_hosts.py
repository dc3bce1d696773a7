"""Embedding tables divided over hosts, which are network namespaces, have the bits of one rank with whole tables."""

from pathlib import Path

import pytest
from host_network import Hosts

from tests.digests import digests

PROGRAM = Path(__file__).parent.parent / "trainer" / "programs" / "divided_tables.py"


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["", "dynamic,"])
def test_tables_divided_over_hosts_have_the_bits_of_one_rank(
    hosts: Hosts, fork_python, tmp_path, kind: str, ranks: int
) -> None:
    kinds = f"{kind}rules,clipped,steps"
    expected = digests(fork_python(PROGRAM, kinds, tmp_path), least=11)
    (hosts.folder / "script.py").write_text(PROGRAM.read_text().replace(', engine="collective"', ""))
    first, second = hosts.run("script.py", kinds, ".", hosts=2, ranks=ranks)
    assert not first.returncode and not second.returncode, first.stderr + second.stderr
    assert digests([line.split("] ", 1)[-1] for line in first.stdout.splitlines()], least=11) == expected
