"""Where a rank stands in the mesh."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Place:
    """`ranks[pp][dp]` are the ranks' numbers in the world."""

    pp_rank: int
    dp_rank: int
    ranks: tuple[tuple[int, ...], ...]

    @property
    def rank(self) -> int:
        """Its number in the world."""
        return self.ranks[self.pp_rank][self.dp_rank]

    @property
    def dp(self) -> int:
        """Pipelines side by side."""
        return len(self.ranks[0])

    @property
    def pipe(self) -> list[int]:
        """The ranks of this pipeline."""
        return [row[self.dp_rank] for row in self.ranks]

    @property
    def replicas(self) -> list[int]:
        """The ranks that have this one's place in all pipelines."""
        return list(self.ranks[self.pp_rank])

    @property
    def copies(self) -> list[int]:
        """The ranks that have this one's stages where micro-batches enter at both ends, in all pipelines."""
        places = sorted({self.pp_rank, len(self.ranks) - 1 - self.pp_rank})
        return [rank for place in places for rank in self.ranks[place]]

    def neighbour(self, pp_rank: int) -> int:
        """The rank at another place of the same pipeline."""
        return self.ranks[pp_rank][self.dp_rank]


def place_in(mesh: DeviceMesh) -> Place:
    """Where this rank is in a mesh with a dimension `pp` and perhaps `dp`."""
    names = mesh.mesh_dim_names
    if names not in (("pp",), ("pp", "dp"), ("dp", "pp")):
        raise ValueError(
            f"the mesh has the dimensions pp, or pp and dp, got {names}; "
            'make it by init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp"))'
        )
    table = mesh.mesh if names[0] == "pp" else mesh.mesh.t()
    ranks = tuple(tuple(row) for row in table.reshape(mesh["pp"].size(), -1).tolist())
    return Place(mesh.get_local_rank("pp"), mesh.get_local_rank("dp") if "dp" in names else 0, ranks)
