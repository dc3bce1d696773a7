"""The numbers of a run as OpenTelemetry's SDK reads them."""

import pytest

import unisono
from unisono.loggers import OpenTelemetryLogger

metrics = pytest.importorskip("opentelemetry.sdk.metrics")
export = pytest.importorskip("opentelemetry.sdk.metrics.export")


def read(reader):
    """Return the values of all gauges, by name and attributes."""
    return {
        (metric.name, *sorted(dict(point.attributes).values())): point.value
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }


@pytest.mark.parametrize("failed", [False, True])
def test_the_sdk_reads_the_latest_numbers(tmp_path, failed):
    reader = export.InMemoryMetricReader()
    provider = metrics.MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    logger = OpenTelemetryLogger(meter_provider=provider)
    with logger, unisono.RunLog(tmp_path / "mine", progress=False, listeners=[logger]) as log:
        for step in range(5):
            log.step(loss=1.0 / (1 + step), epoch=step // 2, accuracy=0.5)
        log.evaluation("test", accuracy=0.75)
        assert logger.flush()
        found = read(reader)
        assert found["unisono.state", "mine"] == 0
        logger.close(failed=failed)
    assert found["unisono.steps", "mine"] == 5
    assert found["unisono.epoch", "mine"] == 2
    assert found["unisono.value", "mine", "train/loss"] == 0.2
    assert found["unisono.value", "mine", "train/accuracy"] == 0.5
    assert found["unisono.value", "mine", "test/accuracy"] == 0.75
    assert read(reader)["unisono.state", "mine"] == (2 if failed else 1)
    provider.shutdown()
