"""The process of a tensor-parallel rank other than rank 0, with a mover for the pool that it may have of its own: what
`engine.ranks.group` starts for a worker."""

from engine.ranks.follower import main
from transfer.ranks.follower import serve

PROGRAM = "worker.rank"

if __name__ == "__main__":
    main(serve)
