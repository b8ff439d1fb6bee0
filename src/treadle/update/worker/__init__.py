"""An inference worker: it loads buckets, votes, keeps a rollback copy, and serves one version at a time."""
