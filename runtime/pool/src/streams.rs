//! The progress of streams, tracked without an event for each free.
//!
//! Work of a stream is counted as it is submitted. A freed block remembers its stream and that
//! stream's count: the same stream may use it at once, because its work is done in order; another
//! stream may use it once the first stream has reached that count.

use super::block::Block;
use super::source::Stream;

#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    submitted: u64,
    /// The driver's last report.
    completed: u64,
}

/// All streams of a device that were ever named.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    all: Vec<Progress>,
}

impl Streams {
    fn get(&self, stream: Stream) -> Progress {
        self.all
            .get(usize::from(stream.0))
            .copied()
            .unwrap_or_default()
    }

    fn entry(&mut self, stream: Stream) -> &mut Progress {
        let at = usize::from(stream.0);
        if self.all.len() <= at {
            self.all.resize(at + 1, Progress::default());
        }
        &mut self.all[at]
    }

    /// Counts a piece of work; its number.
    pub fn submit(&mut self, stream: Stream) -> u64 {
        let progress = self.entry(stream);
        progress.submitted += 1;
        progress.submitted
    }

    pub fn submitted(&self, stream: Stream) -> u64 {
        self.get(stream).submitted
    }

    /// Applies the driver's report that the stream has come so far. Returns whether that is news.
    pub fn complete(&mut self, stream: Stream, sequence: u64) -> bool {
        let progress = self.entry(stream);
        let sequence = sequence.min(progress.submitted);
        let news = sequence > progress.completed;
        progress.completed = progress.completed.max(sequence);
        news
    }

    /// Whether the block is unused, as far as known.
    pub fn is_done(&self, block: &Block) -> bool {
        block.sequence <= self.get(block.stream).completed
    }

    /// Whether a stream may use a free block.
    pub fn may_use(&self, stream: Stream, block: &Block) -> bool {
        block.stream == stream || self.is_done(block)
    }

    /// Streams with work that is not known to be done, and the number of the last piece.
    pub fn behind(&self) -> Vec<(Stream, u64)> {
        let behind = self
            .all
            .iter()
            .enumerate()
            .filter(|(_, p)| p.completed < p.submitted);
        behind
            .map(|(at, p)| (Stream(at as u16), p.submitted))
            .collect()
    }

    /// The streams that may use two neighbouring free blocks once they are joined: all, if no
    /// stream is at work on either; else the one stream that uses both. Blocks in use by different
    /// streams are not joined, because each would be kept from its own.
    pub fn joined(&self, a: &Block, b: &Block) -> Option<(Stream, u64)> {
        let same = a.stream == b.stream;
        (same || (self.is_done(a) && self.is_done(b)))
            .then(|| (a.stream, if same { a.sequence.max(b.sequence) } else { 0 }))
    }
}
