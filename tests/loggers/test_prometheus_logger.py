"""`PrometheusLogger`: Prometheus' own parser reads the numbers of a run, whatever their names are."""

import math

from prometheus_client.parser import text_string_to_metric_families

from unisono.loggers import PrometheusLogger

NASTY = 'a "name" with \\ and\na line {run="other"} 7'


def read(path):
    samples = [sample for family in text_string_to_metric_families(path.read_text()) for sample in family.samples]
    return {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples}


def test_the_latest_numbers_are_read_by_prometheus(tmp_path):
    path = tmp_path / "new" / "metrics.prom"
    events = [{"event": "run", "time": 1.0, "directory": "runs/digits", "world_size": 4}]
    own = {"event": "step", "epoch": 1, "samples": 8, "lr": 0.1, "step_s": 0.5}
    events += [{**own, "time": 2.0 + i, "total_steps": i + 1, "loss": 1 / (i + 1)} for i in range(3)]
    events.append(
        {"event": "log", "time": 9.5, "epoch": 1, "total_steps": 3, "values": {NASTY: math.inf, "b": math.nan}}
    )
    with PrometheusLogger(path) as logger:
        for event in events:
            logger(event)
        assert logger.flush()
        going_on = read(path)
    run = ("run", "digits")
    assert going_on["unisono_state", run] == 0
    assert going_on["unisono_steps", run] == 3
    assert going_on["unisono_start_ranks", run] == 4
    assert going_on["unisono_step_timestamp_seconds", run] == 9.5
    assert going_on["unisono_value", ("name", "train/loss"), run] == 1 / 3
    assert going_on["unisono_value", ("name", NASTY), run] == math.inf
    assert math.isnan(going_on["unisono_value", ("name", "b"), run])
    assert read(path)["unisono_state", run] == 1
    assert [each.name for each in path.parent.iterdir()] == ["metrics.prom"]
