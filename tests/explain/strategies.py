"""Small prompts that share pieces at random places."""

from hypothesis import strategies as st

PIECES = [[100 * number + i for i in range(30)] for number in range(1, 5)]

piece = st.builds(
    lambda number, begin, length: PIECES[number][begin : begin + length],
    st.integers(0, len(PIECES) - 1),
    st.integers(0, 12),
    st.integers(1, 30),
)
unshared = st.lists(st.integers(0, 3), min_size=1, max_size=5)
prompts = st.lists(st.one_of(piece, piece, unshared), min_size=1, max_size=6).map(
    lambda pieces: [token for piece in pieces for token in piece]
)
"""Token ids, never empty."""
