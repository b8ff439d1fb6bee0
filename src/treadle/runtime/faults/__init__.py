"""Detection of lost ranks: which rank failed first, and at which op.

Each rank keeps a connection to its neighbours in the ring of its pipeline and of its replicas, four at most, and
writes its place into memory that they have mapped, so the op of a killed rank is known after its death. A rank whose
wait runs into its deadline asks around; the walk from who waits to whom they wait for ends at the rank to blame. gloo
cannot be told to give up a wait, but its sockets can be shut, and then the wait raises.
"""
