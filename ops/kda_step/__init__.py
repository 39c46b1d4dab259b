"""The whole KDA layer between its projections for a few tokens of every request, in one launch."""
