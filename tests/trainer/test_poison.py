"""A sample that ends every rank which computes it ends the job, and the report names it."""

import textwrap

import pytest

POISON = """
    import os, signal, sys
    import torch
    import unisono

    engine, how = sys.argv[1:]
    torch.manual_seed(0)
    x = torch.randn(48, 4)
    x[29] = 1000.0
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, engine=engine, progress=False)

    def loss(model, batch):
        if batch[0].max() > 500:
            if how == "error":
                raise ValueError("cannot parse this")
            os.kill(os.getpid(), signal.SIGSEGV)
        return model(batch[0]).square().squeeze(1)

    for epoch in trainer.epochs(1):
        for batch in trainer.batches(torch.utils.data.TensorDataset(x), batch_size=12, shuffle=False):
            trainer.step(loss, batch)
"""


@pytest.mark.parametrize(
    ("engine", "how", "code", "why"),
    [
        ("shared", "kill", 139, "this is the third death at"),
        ("collective", "error", 1, "ValueError for the second time at"),
    ],
)
def test_a_sample_that_ends_its_rank_again_and_again_is_named(run_ranks, tmp_path, engine, how, code, why):
    script = tmp_path / "poison.py"
    script.write_text(textwrap.dedent(POISON))
    job = run_ranks(2, script, engine, how, code=code)
    # Sample 29 is the sixth of the third step: of virtual rank 1, which rank 0 computes.
    assert f"rank 0 is not replaced: {why} step 3, virtual rank 1, samples 25, 29, 33" in job.said
    assert job.err.count("; replaced") == (2 if how == "kill" else 1)


UNREADABLE = """
    import os, signal, sys
    import torch
    import unisono

    how, workers = sys.argv[1], int(sys.argv[2])

    class Records(torch.utils.data.Dataset):
        def __len__(self):
            return 48

        def __getitem__(self, index):
            if index == 29:
                if how == "error":
                    raise ValueError("cannot parse this")
                os.kill(os.getpid(), signal.SIGSEGV)
            return torch.full((4,), float(index))

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, progress=False)
    for epoch in trainer.epochs(1):
        for batch in trainer.batches(Records(), batch_size=12, shuffle=False, workers=workers):
            trainer.step(lambda model, batch: 1e-6 * model(batch).square().squeeze(1), batch)
"""


@pytest.mark.parametrize(
    ("how", "workers", "code", "told"),
    [
        ("kill", 0, 139, "rank 0 is not replaced: this is the third death at step 3, sample 29"),
        ("error", 0, 1, "rank 0 is not replaced: ValueError for the second time at step 3, sample 29"),
        # The error that tells of the dead worker has its samples.
        ("kill", 1, 1, "samples 24, 28, 32, 25, 29, 33: workers=0 reads in the training process"),
    ],
)
def test_a_sample_that_cannot_be_read_is_named(run_ranks, tmp_path, how, workers, code, told):
    script = tmp_path / "unreadable.py"
    script.write_text(textwrap.dedent(UNREADABLE))
    job = run_ranks(2, script, how, workers, code=code)
    assert told in job.said, job.said
