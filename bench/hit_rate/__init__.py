"""Hit rates of sessions: the append-only law, and the ways in which they collapse in practice."""
