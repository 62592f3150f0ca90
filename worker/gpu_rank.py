"""The process of a tensor-parallel rank that has a GPU, with a mover for its pool: `python -m worker.gpu_rank`, started
by rank 0."""

from functools import partial

from engine.ranks.device_follower import DeviceFollower
from engine.ranks.follower import main
from transfer.ranks.follower import serve
from worker.rank_devices import CudaDevices

if __name__ == "__main__":
    main(opened=partial(DeviceFollower, devices=CudaDevices(), serve=serve))
