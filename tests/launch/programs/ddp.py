"""Plain data parallel training, as in torch's tutorials."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset), num_workers=1)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(4):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
    weights = [torch.empty(1, 8) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, model.module.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert loss < 0.5, loss
    print("trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
