"""Progress events of rank 0 reach the display."""

import io

from unisono.launch.output.event_relay import EventRelay


class Display:
    """Stands in for `unisono.watch.display.Progress`."""

    def __init__(self, stream):
        self.seen = []
        self.closed = False

    def handle(self, event):
        self.seen.append(event)

    def close(self):
        self.closed = True


def test_events_reach_the_display_whatever_the_pieces(monkeypatch):
    monkeypatch.setattr("unisono.watch.display.Progress", Display)
    complaints = []
    relay = EventRelay(io.StringIO(), complain=complaints.append)
    relay.feed(b'{"event": "run"')
    assert relay.display is None
    relay.feed(b'}\n{"event": "step", "loss": 0.5}\n{"ev')
    display = relay.display
    assert display.seen == [{"event": "run"}, {"event": "step", "loss": 0.5}]
    relay.feed(b'ent"\nno event\n[1]\n')
    assert len(complaints) == 1 and "'{\"event\"'" in complaints[0]
    relay.close()
    assert display.closed and relay.display is None


def test_half_an_event_of_a_lost_process_is_forgotten(monkeypatch):
    monkeypatch.setattr("unisono.watch.display.Progress", Display)
    complaints = []
    relay = EventRelay(io.StringIO(), complain=complaints.append)
    relay.feed(b'{"event": "step", "total_steps": 3}\n{"event": "st')
    relay.restart()
    relay.feed(b'{"event": "resume", "total_steps": 2}\n')
    assert [event["event"] for event in relay.display.seen] == ["step", "resume"]
    assert relay.step == 2 and not complaints


def test_a_relay_without_events_loads_no_display():
    relay = EventRelay(io.StringIO(), complain=print)
    relay.close()
    assert relay.display is None


def test_the_agent_draws_the_progress_of_rank_0(warm_launcher):
    result = warm_launcher.run_script(
        """
        import json, os, time
        if "UNISONO_EVENTS_FD" in os.environ:
            with open(int(os.environ["UNISONO_EVENTS_FD"]), "w") as pipe:
                for kind, fields in [
                    ("run", {"world_size": 2, "parameters": 1234}),
                    ("epoch", {"epoch": 0, "epochs": 1, "steps": 2, "first_step": 0, "num_samples": 8}),
                    ("step", {"epoch": 0, "step": 0, "total_steps": 1, "loss": 0.5, "samples": 4, "step_s": 0.1}),
                    ("step", {"epoch": 0, "step": 1, "total_steps": 2, "loss": 0.25, "samples": 4, "step_s": 0.1}),
                    ("end", {"total_steps": 2, "seconds": 0.2}),
                ]:
                    print(json.dumps({"time": time.time(), "event": kind, **fields}), file=pipe)
        print("done")
        """
    )
    assert result.returncode == 0
    assert result.stdout in ("[0-1] done\n", "[0] done\n[1] done\n", "[1] done\n[0] done\n")
    assert "2 ranks" in result.stderr and "loss 0.3750" in result.stderr
