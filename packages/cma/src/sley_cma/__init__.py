"""Cross-memory attach (CMA): ranks of one host read each other's memory: one copy, where a socket takes two.

    owner                                    reader
    offer(tensors) ── addresses, mark, number ──>  inbox
                                             wait_table: waits for the number, compares the marks; then it reads what it wants
    wait_read  <────── number ─────────────  done: the owner may write again

    process_vm    the two calls of Linux that copy
    inbox         where in a rank's memory its peers write what they offer, and what they have read
    connection    the members of a group to each other: who is whose process, is it still there
    offers        one row of offers, in one order on all ranks
    rows, sums    the exchanges made of them
    transport     `Cma`, the transport

Addresses and numbers are pushed into the other's inbox, so that waiting looks at one's own memory and a rank that has done its
part may end. Nothing moves an exchange but the ranks' own calls, so between two of them no core is taken.
"""
