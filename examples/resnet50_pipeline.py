"""Train a ResNet-50 that is cut over ranks; equal weights on any number of ranks and stages.

    unisono run -n 2 examples/resnet50_pipeline.py      # about 20 s on two cores

The model is written as for one process. Its first stage is on rank 0, the second on rank 1; with -n 4, there are two
such replicas. The images, stripes under noise, are made here, and the network is narrow: `--width 64 --size 224` is the
ResNet-50 of the paper (He et al., 2015). The last line does not change with -n or --stages.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

parser = argparse.ArgumentParser(description="Train a ResNet-50 that is cut over ranks.")
parser.add_argument("--stages", type=int, default=2, choices=range(2, 9))
parser.add_argument("--schedule", default="1f1b", choices=["auto", "1f1b", "gpipe", "interleaved", "zero-bubble"])
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=128, help="images of all ranks together")
parser.add_argument("--virtual-ranks", type=int, default=8, help="fixed shares of a batch: the micro-batches")
parser.add_argument("--width", type=int, default=16, help="channels of the first layer")
parser.add_argument("--size", type=int, default=64, help="pixels of a side of an image")
parser.add_argument("--images", type=int, default=1280, help="images to train with")
args = parser.parse_args()


# 1. Data: a test image for every four that are trained with.
def stripes(count, seed):
    """Return images of stripes in eight directions, of several widths, under noise; and the directions."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 8
    y, x = torch.meshgrid(torch.linspace(-1, 1, args.size), torch.linspace(-1, 1, args.size), indexing="ij")
    angle = (labels * torch.pi / 8).view(-1, 1, 1)
    waves, phase = 6 + 8 * torch.rand(2, count, 1, 1, generator=generator)
    images = torch.sin(waves * (x * angle.cos() + y * angle.sin()) + phase).unsqueeze(1)
    return TensorDataset(images + 0.3 * torch.randn(count, 3, args.size, args.size, generator=generator), labels)


train, test = stripes(args.images, seed=0), stripes(args.images // 4, seed=1)


# 2. Model: 16 blocks of three convolutions.
class Bottleneck(nn.Module):
    def __init__(self, channels, width, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut = nn.Sequential()
        if channels != 4 * width:
            self.shortcut.extend([nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)])

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + self.shortcut(x))


class ResNet50(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks, channels = [], width
        for group, depth in enumerate([3, 4, 6, 3]):
            for block in range(depth):
                blocks.append(Bottleneck(channels, width << group, stride=2 if group and not block else 1))
                channels = 4 * width << group
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(channels, classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def loss(model, batch):
    """One loss per image, and whether it was recognised."""
    out = model(batch[0])
    return {"loss": F.cross_entropy(out, batch[1], reduction="none"), "accuracy": out.argmax(1) == batch[1]}


# 3. Stages: each has equally many blocks. The first one also has the stem, the last one the head.
starts = [f"blocks.{stage * 16 // args.stages}" for stage in range(1, args.stages)]
parallel = unisono.parallel.Pipeline(stages=starts, schedule=args.schedule)

# 4. Loop.
torch.manual_seed(0)
model = ResNet50(args.width, classes=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
trainer = unisono.Trainer(model, optimizer, virtual_ranks=args.virtual_ranks, parallel=parallel)
for epoch in trainer.epochs(args.epochs):
    for batch in trainer.batches(train, batch_size=args.batch_size):
        result = trainer.step(loss, batch)
    trainer.print(f"epoch {epoch}: loss {result:.4f}, accuracy {result.values['accuracy']:.4f}")
trainer.print("test accuracy:", trainer.evaluate(loss, test)["accuracy"])
trainer.print("weights sha256:", trainer.digest())
