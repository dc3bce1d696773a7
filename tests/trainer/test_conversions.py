"""A model that is converted between two steps comes to the bits of one rank, or is refused on all ranks."""

from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "conversions.py"

REFUSED = {
    "channels last, shards": "divided over ranks, as by model.to(...), half() or p.data = ...",
    "channels last, optimizer's state": "divided over ranks, as by model.to(...), half() or p.data = ...",
    "channels last, stages": "since the Trainer was made, as by model.to(...): stages have agreed",
    "half and back, shards": "divided over ranks, as by model.to(...), half() or p.data = ...",
}


def told_by(lines):
    return dict(line.split(": ", 1) for line in lines)


def test_it_has_the_bits_of_one_rank_or_is_refused_on_all(fork_ranks):
    alone = told_by(fork_ranks(1, PROGRAM).lines())
    assert [len(digest) for digest in alone.values()] == [64] * 10
    for conversion in ("channels last", "half and back"):
        assert len({digest for name, digest in alone.items() if name.startswith(conversion)}) == 1
    job = fork_ranks(2, PROGRAM)
    for rank in range(2):
        told = told_by(job.lines(rank))
        assert told.keys() == alone.keys()
        for name, words in told.items():
            assert words == alone[name] or REFUSED[name] in words, (name, words)
            assert (name in REFUSED) == ("Convert the model before" in words), name
