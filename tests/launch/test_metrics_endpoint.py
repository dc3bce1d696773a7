"""`unisono run --metrics HOST:PORT`: Prometheus gets the numbers of a job, and a bad address is one sentence."""

import socket

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ports import free_port

TRAIN = """
    import sys, time, urllib.error, urllib.request
    import torch, unisono

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.arange(32) % 3)
    loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), virtual_ranks=4)
    trainer.fit(loss, data, epochs=1, batch_size=8)
    url = f"http://127.0.0.1:{sys.argv[1]}"
    text = ""
    for _ in range(200 if trainer.is_main else 0):  # the launcher reads events as they come
        text = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
        if "unisono_state{" in text and 'unisono_state{run="train.py"} 1.0' in text:
            break
        time.sleep(0.05)
    if trainer.is_main:
        print(text)
        for path, method in (("/other", "GET"), ("/metrics", "POST")):
            try:
                urllib.request.urlopen(urllib.request.Request(url + path, method=method), timeout=30)
            except urllib.error.HTTPError as error:
                print("#", error.code)
    unisono.comm.barrier()  # until then both ranks run
"""


@pytest.fixture
def launcher(warm_launcher):
    return warm_launcher


def test_prometheus_reads_the_numbers_of_a_run_and_of_its_job(launcher):
    port = free_port()
    script = launcher.write("train.py", TRAIN)
    done = launcher.run("run", "-n", "2", "--metrics", f"127.0.0.1:{port}", script, port)
    assert done.returncode == 0, done.stderr
    text = "\n".join(line.partition(" ")[2] if line.startswith("[") else line for line in done.stdout.splitlines())
    found = {
        (sample.name, sample.labels.get("name")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["unisono_steps", None] == 4
    assert found["unisono_state", None] == 1
    assert found["unisono_job_ranks", None] == found["unisono_job_running", None] == 2
    assert found["unisono_job_recoveries", None] == 0
    assert found["unisono_value", "train/lr"] == 0.5
    assert 0 < found["unisono_value", "train/loss"] < 10
    assert [line for line in text.splitlines() if line.startswith("# 4")] == ["# 404", "# 405"]
    with socket.create_server(("127.0.0.1", int(port))):  # it is free again
        pass


def test_a_port_in_use_is_refused_before_a_rank_starts(launcher):
    script = launcher.write("train.py", "print('started')")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = launcher.run("run", "-n", "1", "--metrics", f"127.0.0.1:{port}", script)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"unisono: --metrics 127.0.0.1:{port} cannot be served: Address already in use. Give another port, or port 0 "
        "for one that is free.\n"
    )


@pytest.mark.parametrize("address", ["9400", ":9400", "localhost", "localhost:http", "localhost:99999"])
def test_what_is_no_address_is_refused(launcher, address):
    done = launcher.run("run", "--metrics", address, launcher.write("train.py", "print('started')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"unisono: --metrics '{address}' is not a")
    assert done.stderr.count("\n") == 1
