"""A long mixed load on one small engine, with every answer checked (`make soak`)."""
