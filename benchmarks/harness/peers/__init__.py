"""Other libraries' positions beside posenc's: checked to be equal, then timed in alternating calls.

``side.py`` says what a peer is, ``ours.py`` is posenc's side of any scheme, ``torch_peers.py`` and
``jax_peers.py`` list the peers, ``measure.py`` checks and times them, ``report.py`` writes tables.
"""
