"""Programs of blocks, recomputation, ties and the end of a step, written as text as those of `written_programs`.

Where each op is on a lane of its own, nothing but dependencies orders them, and every one of these is needed.
"""

from __future__ import annotations

from dataclasses import replace

from tests.support.written_programs import ATTN_B, ATTN_F, DENSE, MLP_B, MLP_F, MLP_W
from treadle.ir import Placement
from treadle.ir.ops import OpKind
from treadle.ir.program import Layout

SIZES = {ATTN_F: 3, OpKind.EMBED_F: 7, OpKind.MTP_F: 5, OpKind.HEAD_F: 11}

# an MTP block between the last layer and the head
MTP_LAST = Layout(Placement.loop(2), 1, ("Et", "tmL"), (ATTN_F,), (ATTN_B,), (OpKind.MTP_W,), saved=SIZES)
WITH_MTP = """
    0 COMPUTE: e=EMBED_F0.0
    0 COMPUTE: a=ATTN_F0.0<e
    0 SEND 1 g0: sf=SEND_F0.0<a
    1 RECV 0 g0: rf=RECV_F0.0
    1 COMPUTE: A=ATTN_F0.0<rf
    1 COMPUTE: p=MTP_F0.0<A
    1 COMPUTE: h=HEAD_F0.0<p
    1 COMPUTE: k=HEAD_B0.0<h
    1 COMPUTE: q=MTP_B0.0<k
    1 COMPUTE: T=ATTN_B0.0<q
    1 COMPUTE: w=MTP_W0.0<q
    1 SEND 0 g1: sb=SEND_B0.0<T
    0 RECV 1 g1: rb=RECV_B0.0
    0 COMPUTE: t=ATTN_B0.0<rb
    0 COMPUTE: g=EMBED_B0.0<t
    0 DP: r0=REDUCE_GRAD-1.0<g
    1 DP: r1=REDUCE_GRAD-1.0<w,T
"""

# stages without layers: an MTP block alone, and a head alone
NO_LAYERS = replace(MTP_LAST, placement=Placement.loop(3), blocks=("t", "m", "L"))
LAYERLESS = """
    0 COMPUTE: a=ATTN_F0.0
    0 SEND 1 g0: sf0=SEND_F0.0<a
    1 RECV 0 g0: rf1=RECV_F0.0
    1 COMPUTE: p=MTP_F0.0<rf1
    1 SEND 2 g1: sf1=SEND_F0.0<p
    2 RECV 1 g1: rf2=RECV_F0.0
    2 COMPUTE: h=HEAD_F0.0<rf2
    2 COMPUTE: k=HEAD_B0.0<h
    2 SEND 1 g2: sb2=SEND_B0.0<k
    1 RECV 2 g2: rb1=RECV_B0.0
    1 COMPUTE: q=MTP_B0.0<rb1
    1 COMPUTE: w=MTP_W0.0<q
    1 SEND 0 g3: sb1=SEND_B0.0<q
    0 RECV 1 g3: rb0=RECV_B0.0
    0 COMPUTE: t=ATTN_B0.0<rb0
"""

TWO_MTP = replace(MTP_LAST, placement=Placement.loop(1), blocks=("tmmL",))
MTP_TWICE = """
    0 COMPUTE: a=ATTN_F0.0
    0 COMPUTE: p0=MTP_F0.0<a
    0 COMPUTE: p1=MTP_F0.0.1<p0
    0 COMPUTE: h=HEAD_F0.0<p1
    0 COMPUTE: k=HEAD_B0.0<h
    0 COMPUTE: q1=MTP_B0.0.1<k
    0 COMPUTE: q0=MTP_B0.0<q1
    0 COMPUTE: t=ATTN_B0.0<q0
    0 COMPUTE: w0=MTP_W0.0<q0
    0 COMPUTE: w1=MTP_W0.0.1<q1
"""

# a dense layer before an MoE layer; the dense one is copied out and back
MIXED = Layout(
    Placement.loop(1),
    1,
    ("dt",),
    (ATTN_F, OpKind.COUNTS, OpKind.HOST, OpKind.DISPATCH_F, MLP_F, OpKind.COMBINE_F),
    (OpKind.COMBINE_B, MLP_B, OpKind.DISPATCH_B, ATTN_B),
    (MLP_W,),
    saved={ATTN_F: 3, MLP_F: 2, OpKind.DISPATCH_F: 4},
    dense_saved={MLP_F: 9},
)
DENSE_FIRST = """
    0 COMPUTE: a0=ATTN_F0.0
    0 COMPUTE: m0=MLP_F0.0<a0
    0 COMPUTE: a1=ATTN_F0.0.1<m0
    0 EP: u1=COUNTS0.0.1<a1
    0 HOST: v1=HOST0.0.1<u1
    0 EP: d1=DISPATCH_F0.0.1<v1
    0 COMPUTE: m1=MLP_F0.0.1<d1
    0 EP: c1=COMBINE_F0.0.1<m1
    0 EP: e1=COMBINE_B0.0.1<c1
    0 COMPUTE: n1=MLP_B0.0.1<e1
    0 COMPUTE: w1=MLP_W0.0.1<n1
    0 EP: g1=DISPATCH_B0.0.1<n1
    0 COMPUTE: t1=ATTN_B0.0.1<g1
    0 COMPUTE: n0=MLP_B0.0<t1,on
    0 COMPUTE: w0=MLP_W0.0<n0
    0 COMPUTE: t0=ATTN_B0.0<n0
    0 OUT: off=OFFLOAD0.0<m0
    0 IN: on=ONLOAD0.0<off
"""

AGAIN = Layout(
    Placement.loop(1),
    1,
    ("t",),
    (ATTN_F, OpKind.DISPATCH_F, MLP_F, OpKind.COMBINE_F),
    (OpKind.COMBINE_B, MLP_B, OpKind.DISPATCH_B, ATTN_B),
    (),
    recomputed=(OpKind.ATTN_R, OpKind.MLP_R),
)
RECOMPUTED = """
    0 COMPUTE: a=ATTN_F0.0
    0 EP: d=DISPATCH_F0.0<a
    0 COMPUTE: m=MLP_F0.0<d
    0 EP: c=COMBINE_F0.0<m
    0 EP: e=COMBINE_B0.0<c
    0 COMPUTE: rm=MLP_R0.0<m
    0 COMPUTE: n=MLP_B0.0<e,rm
    0 EP: g=DISPATCH_B0.0<n
    0 COMPUTE: ra=ATTN_R0.0<a
    0 COMPUTE: t=ATTN_B0.0<g,ra
"""
COPIED_AND_RECOMPUTED = """
    0 COMPUTE: a=ATTN_F0.0
    0 EP: d=DISPATCH_F0.0<a
    0 COMPUTE: m=MLP_F0.0<d
    0 EP: c=COMBINE_F0.0<m
    0 OUT: off=OFFLOAD0.0<c
    0 IN: on=ONLOAD0.0<off
    0 EP: e=COMBINE_B0.0<on
    0 COMPUTE: rm=MLP_R0.0<on
    0 COMPUTE: n=MLP_B0.0<e,rm
    0 EP: g=DISPATCH_B0.0<n
    0 COMPUTE: ra=ATTN_R0.0<on
    0 COMPUTE: t=ATTN_B0.0<g,ra
"""

# a parameter of the embedding and the head, of two ranks; it ends the step in full
TIED = Layout(
    Placement.loop(2),
    1,
    ("E", "L"),
    (ATTN_F,),
    (ATTN_B,),
    (),
    tied=((0, 1),),
    step_end=(OpKind.CLIP, OpKind.OPTIMIZER, OpKind.GATHER_PARAMS),
)
TIED_STEP = """
    0 COMPUTE: e=EMBED_F0.0
    0 SEND 1 g0: sf=SEND_F0.0<e
    1 RECV 0 g0: rf=RECV_F0.0
    1 COMPUTE: h=HEAD_F0.0<rf
    1 COMPUTE: k=HEAD_B0.0<h
    1 SEND 0 g1: sb=SEND_B0.0<k
    0 RECV 1 g1: rb=RECV_B0.0
    0 COMPUTE: g=EMBED_B0.0<rb
    0 DP: r0=REDUCE_GRAD-1.0<g
    1 DP: r1=REDUCE_GRAD-1.0<k
    0 TIED g2: x0=REDUCE_TIED-1.0<g
    1 TIED g2: x1=REDUCE_TIED-1.0<k
    0 WORLD g3: c0=CLIP-1.0<r0,x0
    1 WORLD g3: c1=CLIP-1.0<r1,x1
    0 COMPUTE: o0=OPTIMIZER-1.0<c0
    1 COMPUTE: o1=OPTIMIZER-1.0<c1
    0 DP: p0=GATHER_PARAMS-1.0<o0
    1 DP: p1=GATHER_PARAMS-1.0<o1
"""

# both stages on one rank: its reduction is of both chunks, and nobody takes part in it but the rank
TIED_CHUNKS = replace(TIED, placement=Placement.v(1), weights=(OpKind.HEAD_W,), step_end=())
TIED_ALONE = """
    0 COMPUTE: e=EMBED_F0.0
    0 COMPUTE: h=HEAD_F0.1<e
    0 COMPUTE: k=HEAD_B0.1<h
    0 COMPUTE: g=EMBED_B0.0<k
    0 COMPUTE: w=HEAD_W0.1<k
    0 TIED: x=REDUCE_TIED-1.0<g,w
"""

# one layer, and what ends its step after the reduction
STEP = replace(DENSE, forward=(ATTN_F,), backward=(ATTN_B,), step_end=TIED.step_end)
STEP_ENDED = """
    0 COMPUTE: a=ATTN_F0.0
    0 COMPUTE: t=ATTN_B0.0<a
    0 DP: r=REDUCE_GRAD-1.0<t
    0 WORLD: c=CLIP-1.0<r
    0 COMPUTE: o=OPTIMIZER-1.0<c
    0 DP: p=GATHER_PARAMS-1.0<o
"""

# a tie within each rank and over two replicas of it
TIED_REPLICAS = replace(TIED_CHUNKS, dp=2, weights=(), step_end=TIED.step_end)
OF_A_REPLICA = """
    {r} COMPUTE: e{r}=EMBED_F0.0 h{r}=HEAD_F0.1 k{r}=HEAD_B0.1 g{r}=EMBED_B0.0 o{r}=OPTIMIZER-1.0<c{r}
    {r} DP g0: R{r}=REDUCE_GRAD-1.1<k{r} r{r}=REDUCE_GRAD-1.0<g{r} p{r}=GATHER_PARAMS-1.0<o{r}
    {r} TIED g1: x{r}=REDUCE_TIED-1.0<g{r}
    {r} WORLD g2: c{r}=CLIP-1.0<r{r},x{r}
"""
REPLICATED = OF_A_REPLICA.format(r=0) + OF_A_REPLICA.format(r=1)

APART_BLOCKS = [
    (MTP_LAST, WITH_MTP),
    (NO_LAYERS, LAYERLESS),
    (TWO_MTP, MTP_TWICE),
    (MIXED, DENSE_FIRST),
    (AGAIN, RECOMPUTED),
    (AGAIN, COPIED_AND_RECOMPUTED),
    (TIED, TIED_STEP),
    (TIED_CHUNKS, TIED_ALONE),
    (STEP, STEP_ENDED),
]
SOUND_BLOCKS = [*APART_BLOCKS, (TIED_REPLICAS, REPLICATED)]
