//! Ranks in one process: each is a thread, and bytes pass through memory that they share.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use slabwise_kernels::collective::{Transport, TransportError};

/// The exchange in progress.
#[derive(Default)]
struct Exchange {
    /// The bytes that each rank has sent in it.
    sent: Vec<Option<Vec<u8>>>,
    /// The number of ranks that have taken theirs.
    taken: usize,
    /// The number of exchanges before it.
    number: u64,
    /// The rank that is gone, and the reason.
    lost: Option<(usize, String)>,
}

struct Shared {
    exchange: Mutex<Exchange>,
    changed: Condvar,
    patience: Duration,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Exchange> {
        self.exchange.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One of several ranks in this process.
struct Local {
    shared: Arc<Shared>,
    rank: usize,
    ranks: usize,
}

/// The ranks of a new world, in order.
pub(super) fn ranks(ranks: usize, patience: Duration) -> impl Iterator<Item = impl Transport> {
    let shared = Arc::new(Shared {
        exchange: Mutex::new(Exchange {
            sent: vec![None; ranks],
            ..Exchange::default()
        }),
        changed: Condvar::new(),
        patience,
    });
    (0..ranks).map(move |rank| Local {
        shared: Arc::clone(&shared),
        rank,
        ranks,
    })
}

impl Local {
    /// Waits until `done`, for as long as no rank is lost and patience lasts.
    fn wait<'a>(
        &self,
        mut exchange: MutexGuard<'a, Exchange>,
        done: impl Fn(&Exchange) -> bool,
        missing: impl Fn(&Exchange) -> Vec<usize>,
    ) -> Result<MutexGuard<'a, Exchange>, TransportError> {
        let end = Instant::now() + self.shared.patience;
        loop {
            if done(&exchange) {
                return Ok(exchange);
            }
            if let Some((rank, why)) = &exchange.lost {
                return Err(TransportError(format!(
                    "rank {rank} of {} is gone: {why}",
                    self.ranks
                )));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let names: Vec<String> = missing(&exchange).iter().map(usize::to_string).collect();
                return Err(TransportError(format!(
                    "rank {} has waited {:.1} s for rank {} in exchange {}",
                    self.rank,
                    self.shared.patience.as_secs_f64(),
                    names.join(", "),
                    exchange.number
                )));
            }
            let waited = self.shared.changed.wait_timeout(exchange, left);
            exchange = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sends bytes, and calls `take` with those of every rank once all have sent theirs.
    fn exchange(
        &self,
        send: &[u8],
        take: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), TransportError> {
        let mut exchange = self.shared.lock();
        let number = exchange.number;
        exchange.sent[self.rank] = Some(send.to_vec());
        self.shared.changed.notify_all();
        let unsent = |e: &Exchange| (0..e.sent.len()).filter(|&r| e.sent[r].is_none()).collect();
        let all = |e: &Exchange| e.sent.iter().all(Option::is_some);
        let mut exchange = self.wait(exchange, all, unsent)?;
        let lengths = exchange.sent.iter().flatten().map(Vec::len);
        if let Some((rank, other)) = lengths.enumerate().find(|(_, n)| *n != send.len()) {
            let why = format!(
                "rank {rank} sends {other} bytes in exchange {number}, rank {} {}",
                self.rank,
                send.len()
            );
            exchange.lost = Some((self.rank, why.clone()));
            self.shared.changed.notify_all();
            return Err(TransportError(why));
        }
        for (rank, sent) in exchange.sent.iter().enumerate() {
            take(rank, sent.as_deref().unwrap_or_default());
        }
        exchange.taken += 1;
        if exchange.taken == self.ranks {
            exchange.taken = 0;
            exchange.number += 1;
            exchange.sent.fill(None);
            self.shared.changed.notify_all();
            return Ok(());
        }
        // The next exchange begins when every rank has taken what it needs of this one.
        let over = move |e: &Exchange| e.number > number;
        self.wait(exchange, over, |_| Vec::new()).map(drop)
    }
}

impl Transport for Local {
    fn ranks(&self) -> usize {
        self.ranks
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn all_to_all(&self, send: &[u8], receive: &mut [u8]) -> Result<(), TransportError> {
        let part = receive.len() / self.ranks;
        let own = self.rank * part..(self.rank + 1) * part;
        self.exchange(send, &mut |rank, sent| {
            receive[rank * part..(rank + 1) * part].copy_from_slice(&sent[own.clone()]);
        })
    }

    fn all_gather(&self, send: &[u8], receive: &mut [u8]) -> Result<(), TransportError> {
        self.exchange(send, &mut |rank, sent| {
            receive[rank * sent.len()..(rank + 1) * sent.len()].copy_from_slice(sent);
        })
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        let mut exchange = self.shared.lock();
        // Ranks that wait for this one would wait in vain; those that come later find it gone.
        let why = "its session has ended".to_string();
        exchange.lost.get_or_insert((self.rank, why));
        self.shared.changed.notify_all();
    }
}
