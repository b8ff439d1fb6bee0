"""A Trace as Chrome-trace JSON, which Perfetto and chrome://tracing open, and back.

    {"displayTimeUnit":"ms",
    "otherData":{"about":"predicted with costs 'unit'","time":"1 us here is 1 unit"},
    "treadle":{"version":1,"layout":{...},"clock":{...},"lanes":[{"tid":5,"lane":0,"rank":0,"kind":"COMPUTE",...}],...},
    "traceEvents":[
    {"ph":"M","name":"process_name","pid":1,"args":{"name":"rank 0"}},
    {"ph":"M","name":"thread_name","pid":1,"tid":5,"args":{"name":"compute"}},
    {"ph":"X","name":"F0.0","cat":"compute","pid":1,"tid":5,"ts":0,"dur":1,"args":{"index":0,"kind":"F",...}},
    {"ph":"s","id":16,"name":"message","cat":"message","pid":1,"tid":6,"ts":1},
    {"ph":"f","bp":"e","id":16,"name":"message","cat":"message","pid":2,"tid":8,"ts":1}
    ]}

A process is a rank, a thread a lane, a complete event an op, an arrow a message. What a viewer draws is derived; what
`load` reads is "treadle" and the args, and they are all of the Trace. A file may hold some ranks only: `merge` puts
such parts together. Of a run of several steps the file shows one, and "treadle" has the times of all under "steps".

Perfetto's ways, as found: process 0 is the kernel's (so rank 0 is 1), threads are told apart by tid alone (so no tid is
given twice, nor is it a pid), and an arrow's ends must come behind their events and its start before its end.
"""

from treadle.files.chrome.assemble import load, load_steps, merge
from treadle.files.chrome.write import MOST_OPS, dump

__all__ = ["MOST_OPS", "dump", "load", "load_steps", "merge"]
