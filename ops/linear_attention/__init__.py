"""Linear attention, the delta rule and the gated delta rule, on KDA's kernels: kernels, references, knobs, torch functions."""
