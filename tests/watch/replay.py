"""A run as a display sees it: events at times of a clock that stands still between them."""

from unisono.watch import Progress


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class Script:
    """Plays events to a display, with event times and the clock in step."""

    def __init__(self, stream, **options):
        self.clock = Clock()
        self.stream = stream
        self.progress = Progress(stream, clock=self.clock, **options)

    def __call__(self, kind, after_s=0.0, **fields):
        self.clock.now_s += after_s
        self.progress.handle({"time": 1.7e9 + self.clock.now_s, "event": kind, **fields})

    def run(self, **fields):
        figures = {"world_size": 2, "virtual_ranks": 8, "parameters": 27098, "device": "cpu", "threads": 1}
        self(
            "run", **{"version": "0.1.0", "seed": 0, "directory": "runs/digits", "torch": "2.13.0", **figures, **fields}
        )

    def epoch(self, epoch, *, epochs=5, steps=12, first_step=0, run_steps=None):
        total_steps = 12 * epoch + first_step
        fields = {"first_step": first_step, "num_samples": None, "total_steps": total_steps, "run_steps": run_steps}
        self("epoch", epoch=epoch, epochs=epochs, steps=steps, **fields)

    def steps(self, epoch, steps, *, step_s=0.1, loss=0.8123, samples=100, lr=0.1, **others):
        for step in steps:
            fields = {"total_steps": 12 * epoch + step + 1, "loss": loss, "samples": samples, "lr": lr, **others}
            self("step", step_s, epoch=epoch, step=step, step_s=step_s, **fields)

    def evaluation(self, epoch, name="evaluation", **values):
        self("evaluation", 0.5, epoch=epoch, name=name, values=values, seconds=0.5)

    def log(self, epoch, **values):
        self("log", epoch=epoch, total_steps=0, values=values)

    def checkpoint(self, total_steps):
        self("checkpoint", path="x", total_steps=total_steps, nbytes=1, seconds=0.1)


ACCURACY = {"value": 328 / 360, "total": 328.0, "count": 360}
LOSS = {"value": 2.1034, "total": 26925.1306, "count": 12800}


def text_of(script):
    return script.stream.getvalue()


def bar(script, done, after_s=0.1, *, number=0, name="copy", total=40, ended=False, **values):
    fields = {"name": name, "done": done, "total": total, "unit": "files", "values": values, "ended": ended}
    script("progress", after_s, bar=number, **fields)
