"""The backend `shm` of torch.distributed: process groups over memory that the ranks of one host share."""
