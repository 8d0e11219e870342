"""The mesh: every instance binds one inbox, and pushes to the inboxes of others."""

from shared.mesh.mesh import Mesh
from shared.mesh.resolver import MeshAddress

__all__ = ["Mesh", "MeshAddress"]
