"""A rank's position in the mesh."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("pp", "dp", "ep")
WAY = 'make it by init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp"))'


@dataclass(frozen=True)
class MeshPosition:
    """A rank's coordinates. `ranks[pp][replica]` are numbers in the world; replica `d * ep + e` is that at (d, e)."""

    pp_rank: int
    dp_rank: int
    ranks: tuple[tuple[int, ...], ...]
    ep: int = 1

    @classmethod
    def of(cls, rank: int, pp: int, dp: int, ep: int) -> MeshPosition:
        """Return a rank's position in a mesh of these sizes: what `init_device_mesh` has, without its process groups.

        Example:
            >>> MeshPosition.of(6, pp=2, dp=2, ep=2)
            MeshPosition(pp_rank=1, dp_rank=2, ranks=((0, 1, 2, 3), (4, 5, 6, 7)), ep=2)

        """
        replicas = dp * ep
        ranks = tuple(tuple(range(first, first + replicas)) for first in range(0, pp * replicas, replicas))
        return cls(*divmod(rank, replicas), ranks, ep)

    @property
    def ep_rank(self) -> int:
        """The number of this rank in its expert group."""
        return self.dp_rank % self.ep

    @property
    def rank(self) -> int:
        """The number of this rank in the world."""
        return self.ranks[self.pp_rank][self.dp_rank]

    @property
    def dp(self) -> int:
        """The number of pipelines with tokens of their own: members of an expert group count each."""
        return len(self.ranks[0])

    @property
    def pp_ranks(self) -> list[int]:
        """The ranks of this pipeline."""
        return [row[self.dp_rank] for row in self.ranks]

    @property
    def dp_ranks(self) -> list[int]:
        """The ranks with this one's position along pp, in all pipelines."""
        return list(self.ranks[self.pp_rank])

    @property
    def copies_ranks(self) -> list[int]:
        """The ranks with this one's stages where micro-batches enter at both ends, in all pipelines."""
        return self.in_all_pipelines(self._both_ends)

    def in_all_pipelines(self, pp_ranks: Iterable[int]) -> list[int]:
        """Return the ranks at these positions along pp, in all pipelines."""
        return [rank for pp_rank in pp_ranks for rank in self.ranks[pp_rank]]

    @property
    def ep_ranks(self) -> list[int]:
        """The ranks of this one's expert group, which together hold all experts."""
        first = self.dp_rank - self.dp_rank % self.ep
        return list(self.ranks[self.pp_rank][first : first + self.ep])

    def with_same_experts(self, *, two_ended: bool) -> list[int]:
        """Return the ranks with this one's experts: in other expert groups, and at the pipe's other end."""
        pp_ranks = self._both_ends if two_ended else [self.pp_rank]
        return [rank for pp_rank in pp_ranks for rank in self.ranks[pp_rank][self.dp_rank % self.ep :: self.ep]]

    @property
    def _both_ends(self) -> list[int]:
        return sorted({self.pp_rank, len(self.ranks) - 1 - self.pp_rank})

    def neighbour(self, pp_rank: int) -> int:
        """Return the rank at another position of the same pipeline."""
        return self.ranks[pp_rank][self.dp_rank]


def mesh_position(mesh: DeviceMesh | MeshPosition) -> MeshPosition:
    """Return this rank's position in a mesh with the dimension `pp`, and perhaps `dp` and `ep`."""
    if isinstance(mesh, MeshPosition):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        got = f"{type(mesh).__name__} {mesh!r}"
        raise TypeError(f"the mesh is a DeviceMesh with the dimensions pp, and perhaps dp and ep, got {got}; {WAY}")
    names = mesh.mesh_dim_names or ()
    if "pp" not in names or not set(names) <= set(DIMENSIONS):
        raise ValueError(
            f"the mesh has the dimensions pp, and perhaps dp and ep, got {mesh.mesh_dim_names}; {_way_out(names)}"
        )
    sizes = {name: mesh[name].size() if name in names else 1 for name in DIMENSIONS}
    at = {name: mesh.get_local_rank(name) if name in names else 0 for name in DIMENSIONS}
    table = mesh.mesh.permute([names.index(name) for name in DIMENSIONS if name in names])
    ranks = tuple(tuple(row) for row in table.reshape(sizes["pp"], -1).tolist())
    return MeshPosition(at["pp"], at["dp"] * sizes["ep"] + at["ep"], ranks, sizes["ep"])


def _way_out(names: tuple[str, ...]) -> str:
    others, known = [name for name in names if name not in DIMENSIONS], [name for name in names if name in DIMENSIONS]
    if "pp" not in known or not others:
        return WAY
    without = ", ".join(f'"{name}"' for name in known)
    return (
        f"{WAY}, or give the part without {', '.join(others)}, mesh[{without}]: Treadle does nothing over {others[0]}, "
        "so have parameters that are plain tensors, and talk over it yourself, inside what computes"
    )
