"""Learn vectors of the names in Python's standard library; equal vectors on any number of ranks.

    unisono run -n 2 examples/word_vectors.py      # about a minute and a half on two cores

Skip-gram with negative sampling (word2vec, Mikolov et al. 2013) over the identifiers of the sources of the standard
library, tests included: 71 000 words in Python 3.11. Names that stand among the same names get similar vectors, so the
neighbours of a word tell what it is about. The last line does not change with -n.
"""

import argparse
import keyword
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.embedding import RowwiseAdagrad, Table, Tables

parser = argparse.ArgumentParser(description="Learn vectors of the names in Python's standard library.")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=4096, help="places in the text, of all ranks together")
parser.add_argument("--dim", type=int, default=64, help="the length of a vector")
parser.add_argument("--modules", default="**/*.py", help="the files to read, as a pattern in the library's folder")
parser.add_argument("--near", nargs="*", default=["socket", "sqrt", "startswith", "INFO", "mkdir", "Thread"],
                    help="the words whose neighbours are printed")  # fmt: skip
args = parser.parse_args()

# 1. Data: the names of all files, without keywords, strings and comments. A sample is a name amid WINDOW names on each
# side. Very frequent names are left out at most of their places, with the formula of word2vec.
WINDOW, NEGATIVES, NEGATIVES_OF_PAIR = 4, 64, 5
STRING = r"""(?i:\b[bfru]{1,2})?(?:('{3}|"{3})[\s\S]*?\1|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")"""
TOKENS = re.compile(STRING + r"|#.*|\b([^\W\d]\w+)")
library = Path(sysconfig.get_paths()["stdlib"])
files = [f for f in sorted(library.glob(args.modules)) if "-packages" not in str(f.relative_to(library))]
names = [
    name
    for file in files
    for _, name in TOKENS.findall(file.read_text("utf-8", errors="replace"))
    if name and not keyword.iskeyword(name)
]
if len(names) < 1000:
    parser.error(f"--modules {args.modules!r}: {len(files)} files of {library} with {len(names)} names; it takes 1000")
counts = Counter(names)
words = sorted(counts, key=lambda word: (-counts[word], word))
ids = {word: i for i, word in enumerate(words)}
text = torch.tensor([ids[name] for name in names])
frequency = torch.tensor([counts[word] for word in words]) / len(text)
torch.manual_seed(0)
text = text[torch.rand(len(text)) < (1e-4 / frequency).sqrt()[text]]
data = TensorDataset(text.unfold(0, 2 * WINDOW + 1, 1))
noise = (frequency**0.75).cumsum(0)  # a negative is drawn with a probability as count ** 0.75


# 2. Model: a vector for each word, and another one for what it is as a neighbour.
class SkipGram(nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.word, self.context = tables["word"], tables["context"]
        nn.init.uniform_(self.word.weight, -0.5 / args.dim, 0.5 / args.dim)
        nn.init.zeros_(self.context.weight)

    def forward(self, windows):
        """The loss of each sample. The negatives are drawn once for all samples of a share."""
        center, around = windows[:, WINDOW], torch.cat([windows[:, :WINDOW], windows[:, WINDOW + 1 :]], dim=1)
        limits = noise.to(windows.device)
        drawn = torch.rand(NEGATIVES, device=limits.device) * limits[-1]
        drawn = torch.searchsorted(limits, drawn).clamp_(max=len(words) - 1)
        vector, negatives = self.word(center), self.context(drawn)
        near = F.logsigmoid(torch.bmm(self.context(around), vector.unsqueeze(2))).sum((1, 2))
        far = F.logsigmoid(-vector @ negatives.T).mean(1)
        return -(near + 2 * WINDOW * NEGATIVES_OF_PAIR * far)


def loss(model, batch):
    return model(batch[0])


# 3. Loop.
table = Table(rows=len(words), dim=args.dim, optimizer=RowwiseAdagrad(lr=0.1))
tables = Tables({"word": table, "context": table})
trainer = unisono.Trainer(SkipGram(tables), tables.optimizer, virtual_ranks=8)
trainer.print(f"{len(words)} words at {len(names)} places, {len(text)} of them in an epoch")
for _epoch in trainer.epochs(args.epochs):
    for batch in trainer.batches(data, batch_size=args.batch_size):
        value = trainer.step(loss, batch)
frequent = sum(count >= 20 for count in counts.values())
vectors = F.normalize(tables["word"].weight.detach()[:frequent])
for word in args.near:
    if ids.get(word, frequent) < frequent:
        nearest = (vectors @ vectors[ids[word]]).argsort(descending=True)[1:7]
        trainer.print(f"{word}: {', '.join(words[i] for i in nearest)}")
trainer.print(f"loss of the last batch: {value:.4f}")
trainer.print("weights sha256:", trainer.digest())
