//! A team of threads that shares the chunks of one kernel.

/// Placeholder interface; see the module documentation.
pub struct Team {
    threads: usize,
}

impl Team {
    /// A team of `threads` threads, the caller included.
    pub fn new(threads: usize) -> Self {
        Team { threads: threads.max(1) }
    }

    /// How many threads take part, the caller included.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `work(chunk, worker)` once for each chunk in `0..chunks`, on any worker in `0..threads`, and waits for all.
    pub fn run(&self, chunks: usize, work: &(dyn Fn(usize, usize) + Sync)) {
        for chunk in 0..chunks {
            work(chunk, 0);
        }
    }
}
