"""Cross-memory attach (CMA): ranks of one host read each other's memory, with one copy instead of a socket's two.

    owner                                    reader
    offer(tensors) ── addresses, mark, number ──>  inbox
                                             wait_addresses: waits for the number and compares the marks, then reads
    wait_read  <────── number ─────────────  finish_read: the owner may write again

    connection    copies between processes, and the inboxes to which peers write offers and confirm reads
    offers        a sequence of offers, in the same order on all ranks
    transport     the transport `CmaTransport` and its exchanges

Peers push addresses and numbers into a rank's inbox, so that a rank waits by polling its own memory. Exchanges advance only
during the ranks' calls, so they need no thread.
"""
