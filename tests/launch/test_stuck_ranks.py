"""A rank that keeps the others waiting is killed after a time, if the user has given one, and replaced."""

import pytest


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGSTOP)", "lock.acquire()"])
def test_a_stuck_rank_is_killed_and_replaced_after_its_stack_was_shown(warm_launcher, how):
    script = f"""
        import os, pathlib, signal, threading, torch, unisono
        lock, mark = threading.Lock(), pathlib.Path("mark")
        lock.acquire()
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=4, progress=False)
        data = torch.utils.data.TensorDataset(torch.ones(40, 4))

        def loss(model, batch):
            if trainer.rank == 1 and trainer.steps_done == 3 and not mark.exists():
                mark.touch()
                {how}
            return model(batch[0]).square().mean(1)

        for epoch in trainer.epochs(1):
            for batch in trainer.batches(data, batch_size=8):
                trainer.step(loss, batch)
        print(trainer.steps_done, trainer.recovered)
        """
    name = warm_launcher.write("stuck.py", script)
    result = warm_launcher.run("run", "-n", "2", "--hang-report", "0.5", "--stuck-timeout", "1.5", name)
    assert result.returncode == 0, result.stderr
    assert sorted(line.partition("] ")[2] for line in result.stdout.splitlines()) == ["5 False", "5 True"]
    assert "rank 1 kept the others waiting for 1.5 s; killed (--stuck-timeout)" in result.stderr
    assert result.stderr.index("for rank 1") < result.stderr.index("killed (--stuck-timeout)")
    assert "rank 1 was killed by SIGKILL in forward of step 4; replaced" in result.stderr


def test_a_rank_that_is_stuck_after_another_was_replaced_is_killed_too(warm_launcher):
    script = """
        import os, pathlib, signal, threading, torch, unisono
        lock = threading.Lock()
        lock.acquire()
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=4, progress=False)
        data = torch.utils.data.TensorDataset(torch.ones(80, 4))

        def once(name, rank, step):
            mark = pathlib.Path(name)
            if trainer.rank != rank or trainer.steps_done != step or mark.exists():
                return False
            mark.touch()
            return True

        def loss(model, batch):
            if once("killed", 1, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            if once("stuck", 0, 6):
                lock.acquire()
            return model(batch[0]).square().mean(1)

        for epoch in trainer.epochs(1):
            for batch in trainer.batches(data, batch_size=8):
                trainer.step(loss, batch)
        """
    name = warm_launcher.write("later.py", script)
    result = warm_launcher.run(
        "run", "-n", "2", "--hang-report", "0.5", "--stuck-timeout", "1.5", "--hang-abort", "9", name
    )
    assert result.returncode == 0, result.stderr
    assert "rank 0 kept the others waiting for 1.5 s; killed (--stuck-timeout)" in result.stderr
    assert "all ranks of the group are in it" not in result.stderr


@pytest.mark.parametrize(
    "how", [pytest.param("os.kill(os.getpid(), signal.SIGSTOP)", marks=pytest.mark.soak), "lock.acquire()"]
)
def test_a_stuck_stage_is_killed_and_replaced(warm_launcher, how):
    script = f"""
        import os, pathlib, signal, threading, torch, unisono
        from torch import nn
        lock, mark = threading.Lock(), pathlib.Path("mark")
        lock.acquire()
        torch.manual_seed(0)

        class Stuck(nn.Linear):
            def forward(self, x):
                if unisono.rank() == 2 and trainer.steps_done == 3 and not mark.exists():
                    mark.touch()
                    {how}
                return super().forward(x)

        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Stuck(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pipeline = unisono.parallel.Pipeline(stages=["1", "2"])
        trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, progress=False, parallel=pipeline)
        data = torch.utils.data.TensorDataset(torch.ones(40, 4))
        for epoch in trainer.epochs(1):
            for batch in trainer.batches(data, batch_size=8):
                trainer.step(lambda model, batch: model(batch[0]).square().mean(1), batch)
        print(trainer.steps_done, trainer.recovered)
        """
    name = warm_launcher.write("stuck.py", script)
    result = warm_launcher.run("run", "-n", "3", "--hang-report", "0.5", "--stuck-timeout", "1.5", name)
    assert result.returncode == 0, result.stderr
    assert {line.partition("] ")[2] for line in result.stdout.splitlines()} == {"5 False", "5 True"}
    assert "in recv for rank 2" in result.stderr
    assert "rank 2 kept the others waiting for 1.5 s; killed (--stuck-timeout)" in result.stderr


def test_a_rank_with_a_stuck_part_of_a_divided_model_is_killed(warm_launcher):
    script = """
        import os, signal, torch, unisono
        from torch import nn
        torch.manual_seed(0)

        class Stuck(nn.Linear):
            def forward(self, x):
                if unisono.rank() == 1 and trainer.steps_done == 3:
                    os.kill(os.getpid(), signal.SIGSTOP)
                return super().forward(x)

        model = nn.Sequential(nn.Linear(4, 4), Stuck(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shard = unisono.parallel.Shard(by=["0", "1"])
        trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, progress=False, parallel=shard)
        data = torch.utils.data.TensorDataset(torch.ones(40, 4))
        for epoch in trainer.epochs(1):
            for batch in trainer.batches(data, batch_size=8):
                trainer.step(lambda model, batch: model(batch[0]).square().mean(1), batch)
        """
    name = warm_launcher.write("stuck.py", script)
    result = warm_launcher.run("run", "-n", "2", "--hang-report", "0.5", "--stuck-timeout", "1.5", name)
    assert result.returncode == 137, result.stderr
    assert "in recv for rank 1" in result.stderr
    assert "rank 1 kept the others waiting for 1.5 s; killed (--stuck-timeout)" in result.stderr
