"""Ranks that do not come to a collective, or come to another one."""

from faults.fault import Fault

_HANG = ("--hang-report", "1", "--hang-abort", "2")
_WAITED = "{others} {have} waited "

HANGS = (
    Fault(
        name="early-return",
        source="""
            if bad:
                sys.exit(0)
            wait()  # here
            wait()
        """,
        first="{last} ended while {some} still needed it",
        details=("then failed: RuntimeError: ", "{here}"),
        least_ranks=2,
        ranks=(3,),
    ),
    Fault(
        name="endless-loop",
        source="""
            def search():
                while True:
                    pass  # here
            if bad:
                search()
            wait()
        """,
        options=_HANG,
        first=_WAITED,
        details=("{last}: computing", "in search", "ending the job"),
        least_ranks=2,
        ranks=(2,),
    ),
    Fault(
        name="sigstop",
        source="""
            if bad:
                os.kill(os.getpid(), signal.SIGSTOP)
            wait()
        """,
        options=_HANG,
        first=_WAITED,
        details=("{last}: stopped", "kill -CONT", "ending the job"),
        least_ranks=2,
        ranks=(2,),
    ),
    Fault(
        name="data-loader-stuck",
        source="""
            from torch.utils.data import DataLoader, Dataset
            class Table(Dataset):
                def __len__(self):
                    return 8
                def __getitem__(self, index):
                    if bad and index == 5:
                        time.sleep(600)  # here
                    return torch.tensor(index)
            for batch in DataLoader(Table(), batch_size=2, num_workers=2):
                wait()
        """,
        options=_HANG,
        first=_WAITED,
        details=("{last}: waiting for its DataLoader", "{here} in __getitem__"),
        least_ranks=2,
        ranks=(2,),
    ),
    Fault(
        name="trainer-step",
        source="""
            import time, torch, unisono
            model = torch.nn.Linear(8, 2)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            trainer = unisono.Trainer(model, optimizer, virtual_ranks=8, progress=False)
            data = torch.utils.data.TensorDataset(torch.ones(32, 8))
            for epoch in trainer.epochs(2):
                for batch in trainer.batches(data, batch_size=8):
                    trainer.step(lambda model, batch: model(batch[0]).sum(1), batch)
                    if trainer.steps_done == 3 and trainer.rank == trainer.world_size - 1:
                        time.sleep(600)  # here
        """,
        options=_HANG,
        prologue=False,
        first="{others} {have} waited ",
        details=(" in Trainer.step for {last}", "{here}"),
        least_ranks=2,
        ranks=(2,),
    ),
    Fault(
        name="mismatched-collectives",
        source="""
            if bad:
                dist.broadcast(torch.ones(4), 0)
            else:
                dist.all_reduce(torch.ones(4, 4))  # here
        """,
        options=_HANG,
        first="{last} calls broadcast where {others} {call} all_reduce (collective 2)",
        details=("{others}: all_reduce(float32[4, 4], sum)", "{last}: broadcast(float32[4], root 0)", "{here}"),
        least_ranks=2,
        ranks=(4,),
    ),
    Fault(
        name="mismatched-shapes",
        source="""
            dist.all_reduce(torch.ones(5 if bad else 4))  # here
            time.sleep(60)
        """,
        options=_HANG,
        first="{last} calls all_reduce with float32[5], sum where {others} {have} float32[4], sum",
        codes=(1, 134),
        quiet=False,
        details=("{others}: all_reduce(float32[4], sum)", "{last}: all_reduce(float32[5], sum)", "{here}"),
        least_ranks=2,
        ranks=(),
    ),
    Fault(
        name="barrier-against-all-reduce",
        source="""
            if bad:
                dist.barrier()  # here
            wait()
        """,
        options=_HANG,
        first="{last} calls barrier where {others} {call} all_reduce (collective 2)",
        details=("{last}: barrier()", "{others}: all_reduce(float32[1], sum)", "{here}"),
        least_ranks=2,
        ranks=(),
    ),
    Fault(
        name="timeout",
        source="""
            from datetime import timedelta
            group = dist.new_group(timeout=timedelta(seconds=1))
            if bad:
                time.sleep(60)
            dist.all_reduce(torch.ones(1), group=group)
        """,
        first="{last} did not come where {others} waited for it",
        least_ranks=2,
        ranks=(3,),
    ),
)
