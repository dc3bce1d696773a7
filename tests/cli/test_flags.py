"""Every flag of torchrun is read as torchrun reads it, and becomes the job that was meant."""

import signal
from pathlib import Path

import click
import pytest
from torch.distributed.run import get_args_parser

from unisono.cli import run as command
from unisono.cli import run_flags
from unisono.cli.mpi import refuse_several_launchers
from unisono.cli.run import job_of
from unisono.cli.run_flags import FLAGS
from unisono.cli.slurm import flags_of_slurm
from unisono.launch.launch_job import LaunchJob, Output

BOTH = frozenset({"stdout", "stderr"})
NONE = frozenset()


def job(*words, program=("train.py",)):
    """The job of `unisono run`'s arguments, which are only parsed."""
    context = command.run.make_context("run", [*words, *program], parent=click.Context(click.Group("unisono")))
    given = dict(context.params)
    return job_of(given, given.pop("command"))


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for flag in FLAGS:
        for variable in [flag.envvar] if isinstance(flag.envvar, str) else flag.envvar or ():
            monkeypatch.delenv(variable, raising=False)


def test_every_flag_of_torchrun_is_known_and_so_is_its_variable(monkeypatch):
    ours = {name.replace("_", "-"): flag for flag in FLAGS for name in flag.opts}
    for action in get_args_parser()._actions:
        for name in action.option_strings:
            if name.replace("_", "-") in ("-h", "--help", "--print-completion"):
                continue
            flag = ours[name.replace("_", "-")]
            assert flag.is_flag == (action.nargs == 0)
            if type(action).__name__ in ("env", "check_env"):
                variables = [flag.envvar] if isinstance(flag.envvar, str) else flag.envvar
                assert variables[0] == f"PET_{action.dest.upper()}"
            else:
                assert flag.envvar is None


def test_nothing_given_means_one_rank_and_torchruns_defaults():
    defaults = get_args_parser().parse_args(["train.py"])
    made = job()
    assert made == LaunchJob(target="train.py", stdin=0, output=made.output, signals=made.signals)
    assert set(made.signals) == {signal.Signals[name] for name in defaults.signals_to_handle.split(",")}
    assert made.max_restarts == defaults.max_restarts and made.role == defaults.role
    assert made.output == Output(redirected={0: NONE}, teed={0: NONE})


@pytest.mark.parametrize(
    "words", [["-n", "3"], ["-n3"], ["--nproc-per-node=3"], ["--nproc_per_node", "3"], ["--nproc", "3"]]
)
def test_a_flag_has_all_its_spellings(words):
    assert job(*words).ranks == 3


def test_what_follows_the_program_is_the_programs():
    made = job("-n", "2", program=["train.py", "-n", "3", "--help", "--", "--master_port=1"])
    assert (made.ranks, made.arguments) == (2, ("-n", "3", "--help", "--", "--master_port=1"))


def test_variables_give_defaults_that_flags_beat(monkeypatch):
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_MAX_RESTARTS", "2")
    monkeypatch.setenv("PET_MODULE", "1")
    monkeypatch.setenv("PET_STANDALONE", "0")
    monkeypatch.setenv("PET_MASTER_PORT", "1234")
    monkeypatch.setenv("PET_ROLE", "")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    made = job("--max-restarts", "1")
    assert (made.ranks, made.max_restarts, made.module, made.master_port) == (3, 1, True, 1234)
    assert (made.role, made.shutdown_timeout_s) == ("default", 7.0)
    monkeypatch.setenv("PET_SHUTDOWN_TIMEOUT", "8")
    assert job().shutdown_timeout_s == 8.0


def test_cpu_gpu_and_auto_ask_the_machine(monkeypatch):
    monkeypatch.setattr(run_flags, "usable_cores", lambda: 6)
    monkeypatch.setattr(run_flags, "usable_gpus", lambda _: 2)
    assert [job("-n", text).ranks for text in ("cpu", "gpu", "auto")] == [6, 2, 2]
    monkeypatch.setattr(run_flags, "usable_gpus", lambda _: 0)
    assert job("-n", "auto").ranks == 6
    with pytest.raises(click.UsageError, match="one rank per GPU, and there is no GPU"):
        job("-n", "gpu")
    monkeypatch.setattr(run_flags, "usable_gpus", lambda _: None)
    with pytest.raises(click.UsageError, match="cannot count GPUs other than NVIDIA's"):
        job("-n", "auto")


@pytest.mark.parametrize(
    ("words", "port"),
    [
        ([], 0),
        (["--master-port", "1234"], 1234),
        (["--master_addr=localhost", "--master_port=1234"], 1234),
        (["--master-addr", "[::1]", "--master-port", "1234"], 1234),
        (["--rdzv-endpoint", "localhost:29400"], 29400),
        (["--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:29400", "--master-port", "1234"], 29400),
        (["--rdzv-endpoint", "localhost", "--master-port", "1234"], 1234),
        (["--rdzv-endpoint", "localhost:0", "--master-port", "1234"], 0),
        (["--standalone", "--master-port", "1234", "--rdzv-endpoint", "localhost:29400"], 0),
    ],
)
def test_the_port_is_that_which_torchrun_would_take(words, port):
    assert job(*words).master_port == port


def test_what_means_nothing_on_one_machine_is_taken_and_changes_nothing():
    words = "--nnodes 1:1 --node_rank 0 --rdzv-backend static --rdzv-conf timeout=9 --local-addr 10.0.0.1"
    words += " --monitor-interval 5 --event-log-handler console --use-env --master-addr 127.0.0.1"
    assert job(*words.split()) == job()


def test_the_name_of_the_job_is_the_rendezvous_id_unless_standalone():
    assert job("--rdzv-id", "seven").run_id == "seven"
    assert job("--rdzv-id", "seven", "--standalone").run_id == ""


def test_programs_that_are_not_scripts():
    assert job("--no-python", program=["sleep", "1"]).python is False
    assert job("-m", program=["package.train"]).module is True
    made = job("--run-path", "--no-python")
    assert (made.python, made.module) == (True, False)


def test_the_rest_reaches_the_job():
    words = "--role trainer --start-method spawn --pass-local-rank --virtual_local_rank --hang-report 5 --hang-abort 60"
    words += " --numa-binding core-complex --signals-to-handle SIGUSR1,SIGTERM,SIGUSR1 --cpu-backend shm"
    made = job(*words.split())
    assert (made.role, made.start_method, made.numa_binding) == ("trainer", "spawn", "core-complex")
    assert made.pass_local_rank and made.virtual_local_rank
    assert (made.hang_report_s, made.hang_abort_s) == (5.0, 60.0)
    assert made.signals == (signal.SIGUSR1, signal.SIGTERM)
    assert (made.cpu_backend, job().cpu_backend) == ("shm", "gloo")
    assert job("--start-method", "forkserver").start_method == "fork"
    assert job("--preload", "json", "--preload", "csv").preload == ("json", "csv")


@pytest.mark.parametrize(
    ("words", "redirected", "teed"),
    [
        (["-r", "3"], [BOTH, BOTH], [NONE, NONE]),
        (["--redirects", "0:1,1:2"], [{"stdout"}, {"stderr"}], [NONE, NONE]),
        (["-t", "1:3"], [NONE, NONE], [NONE, BOTH]),
        (["--redirects=3", "--tee=0:1"], [{"stderr"}, BOTH], [{"stdout"}, NONE]),
        (["-r", "7:3,11:3"], [NONE, NONE], [NONE, NONE]),
        (["--log-dir", "logs"], [NONE, NONE], [BOTH, BOTH]),
        (["--log-dir", "logs", "-r", "0"], [NONE, NONE], [NONE, NONE]),
        (["--log-dir", "/dev/null", "-r", "3"], None, None),
    ],
)
def test_streams_go_where_torchrun_sends_them(words, redirected, teed):
    output = job("-n", "2", *words).output
    assert output.redirected == ({} if redirected is None else dict(enumerate(map(frozenset, redirected))))
    assert output.teed == ({} if teed is None else dict(enumerate(map(frozenset, teed))))


def test_what_is_shown_and_copied():
    output = job("--log-dir", "logs", "--local-ranks-filter", "0,2", "--duplicate-stdout-filters", "loss,1,,000").output
    assert (output.directory, output.shown) == (Path("logs"), frozenset({0, 2}))
    assert (output.stdout_filters, output.stderr_filters) == (("loss", "1,000"), ())
    assert job("--log-dir", "/dev/null").output.directory is None


def test_srun_tells_machines_unless_flags_do():
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_STEP_NODELIST": "gpu[003-004]", "SLURM_NODEID": "1"}

    def flags(*words: str, **changes: str) -> dict[str, object]:
        context = command.run.make_context("run", [*words, "x.py"], parent=click.Context(click.Group("unisono")))
        return flags_of_slurm(context.params, step | changes)

    found = flags()
    assert (found["nnodes"], found["node_rank"], found["rdzv_id"]) == ((2, 2), 1, "slurm-7.1")
    assert found["rdzv_endpoint"] == ("gpu003", 20050)
    assert flags("--nnodes", "2", "--rdzv-endpoint", "a:1") == flags("--standalone") == {}
    assert flags(SLURM_STEP_NUM_NODES="1", SLURM_STEP_NUM_TASKS="1") == {}  # as in an interactive shell
    with pytest.raises(ValueError, match="4 launchers on 1 machine,"):
        flags(SLURM_STEP_NUM_NODES="1", SLURM_STEP_NUM_TASKS="4")
    with pytest.raises(ValueError, match="8 launchers on 2 machines"):
        flags(SLURM_STEP_NUM_TASKS="8")


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"])
def test_several_launchers_of_mpirun_on_a_machine_are_refused(variable):
    def check(*words: str) -> None:
        context = command.run.make_context("run", [*words, "x.py"], parent=click.Context(click.Group("unisono")))
        refuse_several_launchers(context.params, {variable: "3"})

    with pytest.raises(ValueError, match="mpirun has started 3 launchers on this machine"):
        check("-n", "2")
    check("--standalone")
    check("--nnodes", "2", "--rdzv-endpoint", "a:1")
