"""Where the time goes: what `tsdoc profile` measures.

prepare    a model (or random weights of its shape) and a prompt
measure    prefill by kind of work, decode, kernels beside the machine's ceilings, full attention
keep       the same K and V written to a store of its own, opened, and found by a new process
report     all of it as one object, for a table, JSON and a page
"""
