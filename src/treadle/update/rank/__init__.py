"""An update rank: it sends its weights bucket by bucket, and speaks for the worker beside it."""
