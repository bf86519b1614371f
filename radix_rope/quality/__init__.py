"""The built-in texts with known answers, by which the error of reuse is measured."""
