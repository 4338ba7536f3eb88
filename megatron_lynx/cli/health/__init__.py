"""What ``lynx doctor`` looks at before a job is launched; each module a kind of fault."""
