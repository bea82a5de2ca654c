//! Connections beside MPI, by which the loss of a rank is detected.
//!
//! Each rank keeps a TCP connection to rank 0 and sends its position several times a second. The
//! end of a connection without a farewell, or silence, means that the rank is gone; rank 0 tells
//! all others. The end of the connection to rank 0 means that rank 0 is gone.
//!
//! Messages have a fixed size. A connection is accepted if it begins with a token of 128 random
//! bits, which ranks receive through MPI.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::engine::{FAILED, Shared};
use crate::{Error, Result};

/// The time between two messages of a rank.
const BEAT: Duration = Duration::from_millis(250);
/// The time in which a connection must be made, and the least silence after which a rank counts as
/// gone.
const SILENCE: Duration = Duration::from_secs(10);
/// The bytes of a message.
const MESSAGE: usize = 32;

/// The secret of a world.
pub(super) type Token = [u8; 16];

/// A message of the lifeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    /// The first message of a connection.
    Hello { rank: u32, token: Token },
    /// The position of a rank; from rank 0, that of the slowest rank.
    Beat { rank: u32, step: u64, started: u64 },
    /// A rank is lost.
    Lost {
        rank: u32,
        loss: Loss,
        millis: u64,
        step: u64,
    },
    /// A rank leaves the world after a number of collectives.
    Left { rank: u32, started: u64 },
}

/// The way in which a rank was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    Ended,
    Silent,
    Late,
    Left,
    Failed,
}

impl Loss {
    /// The words that complete "rank 3 …".
    fn why(self, millis: u64, step: u64) -> String {
        match self {
            Loss::Ended => "is gone (its connection ended)".into(),
            Loss::Silent => format!("is gone (silent for {:.1} s)", millis as f64 / 1000.0),
            Loss::Late => format!(
                "has not arrived after {:.1} s (it is at step {step})",
                millis as f64 / 1000.0
            ),
            Loss::Left => "has left the world".into(),
            Loss::Failed => FAILED.into(),
        }
    }
}

impl Message {
    fn to_bytes(self) -> [u8; MESSAGE] {
        let mut bytes = [0; MESSAGE];
        let (kind, detail, rank, a, b) = match self {
            Message::Hello { rank, token } => {
                bytes[0] = 1;
                bytes[4..8].copy_from_slice(&rank.to_le_bytes());
                bytes[8..24].copy_from_slice(&token);
                return bytes;
            }
            Message::Beat {
                rank,
                step,
                started,
            } => (2, 0, rank, step, started),
            Message::Lost {
                rank,
                loss,
                millis,
                step,
            } => (3, loss as u8, rank, millis, step),
            Message::Left { rank, started } => (4, 0, rank, started, 0),
        };
        (bytes[0], bytes[1]) = (kind, detail);
        bytes[4..8].copy_from_slice(&rank.to_le_bytes());
        bytes[8..16].copy_from_slice(&a.to_le_bytes());
        bytes[16..24].copy_from_slice(&b.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; MESSAGE]) -> Option<Message> {
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let rank = u32::from_le_bytes(std::array::from_fn(|i| bytes[4 + i]));
        let losses = [
            Loss::Ended,
            Loss::Silent,
            Loss::Late,
            Loss::Left,
            Loss::Failed,
        ];
        Some(match bytes[0] {
            1 => Message::Hello {
                rank,
                token: std::array::from_fn(|i| bytes[8 + i]),
            },
            2 => Message::Beat {
                rank,
                step: long(8),
                started: long(16),
            },
            3 => {
                let loss = *losses.get(usize::from(bytes[1]))?;
                Message::Lost {
                    rank,
                    loss,
                    millis: long(8),
                    step: long(16),
                }
            }
            4 => Message::Left {
                rank,
                started: long(8),
            },
            _ => return None,
        })
    }
}

/// The position of a rank in the program.
#[derive(Clone, Copy, Default)]
struct Position {
    step: u64,
    started: u64,
}

/// A rank's end of the lifeline.
pub(super) struct Lifeline {
    line: Arc<Line>,
}

struct Line {
    rank: usize,
    shared: Arc<Shared>,
    /// The connections for writing: to all others on rank 0, to rank 0 on the others.
    writers: Mutex<Vec<TcpStream>>,
    /// On rank 0 the positions of all ranks; on others the slowest one's is kept at its place, with
    /// all others ahead.
    positions: Mutex<Vec<Option<Position>>>,
    /// The silence after which a rank counts as gone: a rank that is stopped may go on.
    silence: Duration,
    is_over: AtomicBool,
}

/// A connection for reading.
struct Link {
    peer: usize,
    stream: TcpStream,
    bytes: [u8; MESSAGE],
    filled: usize,
    heard: Instant,
    has_left: bool,
}

impl Lifeline {
    /// Accepts the connections of all other ranks.
    ///
    /// # Errors
    /// If a rank does not connect in time.
    pub fn accept(
        listener: &TcpListener,
        token: Token,
        size: usize,
        (shared, patience): (Arc<Shared>, Duration),
        until: Instant,
    ) -> Result<Lifeline> {
        let failed = |e: std::io::Error| Error::Join(format!("the lifeline failed: {e}"));
        listener.set_nonblocking(true).map_err(failed)?;
        let mut links: Vec<Option<TcpStream>> = (0..size).map(|_| None).collect();
        while let Some(missing) = (1..size).find(|rank| links[*rank].is_none()) {
            if Instant::now() >= until {
                return Err(Error::Join(format!(
                    "rank {missing} of {size} did not connect to rank 0 in time"
                )));
            }
            match listener.accept() {
                Ok((stream, _)) => {
                    // A stranger's connection is dropped.
                    if let Some(rank) = greeted(&stream, token)
                        && let Some(link @ None) = links.get_mut(rank)
                    {
                        *link = Some(stream);
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    thread::sleep(Duration::from_millis(1));
                }
                Err(e) => return Err(failed(e)),
            }
        }
        let links = links.into_iter().enumerate();
        let links = links
            .filter_map(|(peer, stream)| Some((peer, stream?)))
            .collect();
        Lifeline::over(0, size, links, (shared, patience))
    }

    /// Connects to rank 0 at the first of its addresses that answers.
    ///
    /// # Errors
    /// If none does.
    pub fn connect(
        addresses: &[SocketAddr],
        token: Token,
        (rank, size): (usize, usize),
        (shared, patience): (Arc<Shared>, Duration),
    ) -> Result<Lifeline> {
        let mut why = String::from("no address");
        for address in addresses {
            let connected = TcpStream::connect_timeout(address, SILENCE).and_then(|mut stream| {
                let hello = Message::Hello {
                    rank: rank as u32,
                    token,
                };
                stream.write_all(&hello.to_bytes()).map(|()| stream)
            });
            match connected {
                Ok(stream) => {
                    return Lifeline::over(rank, size, vec![(0, stream)], (shared, patience));
                }
                Err(e) => why = format!("{address}: {e}"),
            }
        }
        Err(Error::Join(format!(
            "rank {rank} of {size} cannot connect to rank 0 ({why})"
        )))
    }

    fn over(
        rank: usize,
        size: usize,
        streams: Vec<(usize, TcpStream)>,
        (shared, patience): (Arc<Shared>, Duration),
    ) -> Result<Lifeline> {
        let failed = |e: std::io::Error| Error::Join(format!("the lifeline failed: {e}"));
        let mut writers = Vec::with_capacity(streams.len());
        let mut links = Vec::with_capacity(streams.len());
        for (peer, stream) in streams {
            stream.set_nodelay(true).map_err(failed)?;
            // Both ends share the mode; a message is far smaller than the socket's buffer.
            stream.set_nonblocking(true).map_err(failed)?;
            writers.push(stream.try_clone().map_err(failed)?);
            let heard = Instant::now();
            let (bytes, filled, has_left) = ([0; MESSAGE], 0, false);
            links.push(Link {
                peer,
                stream,
                bytes,
                filled,
                heard,
                has_left,
            });
        }
        let line = Arc::new(Line {
            rank,
            shared,
            writers: Mutex::new(writers),
            positions: Mutex::new(vec![None; size]),
            silence: patience.max(SILENCE),
            is_over: AtomicBool::new(false),
        });
        let theirs = Arc::clone(&line);
        let thread = thread::Builder::new().name("slabwise-lifeline".into());
        thread.spawn(move || theirs.watch(links)).map_err(failed)?;
        Ok(Lifeline { line })
    }

    /// The rank that is furthest behind, if it has not started a collective, with its step and the
    /// number of collectives it has started.
    pub fn latecomer(&self, seq: u64) -> Option<(usize, u64, u64)> {
        let positions = self.line.positions();
        let behind = positions
            .iter()
            .enumerate()
            .filter_map(|(rank, at)| Some((rank, (*at)?)));
        let (rank, at) = behind
            .filter(|(rank, _)| *rank != self.line.rank)
            .min_by_key(|(_, at)| at.started)?;
        (at.started <= seq).then_some((rank, at.step, at.started))
    }

    /// Tells all others that a rank is lost, in words as near to `why` as messages can be.
    pub fn tell_lost(&self, rank: usize, why: &str) {
        let step = self.line.positions()[rank].map_or(0, |at| at.step);
        let loss = match why {
            FAILED => Loss::Failed,
            why if why.contains("not arrived") => Loss::Late,
            _ => Loss::Left,
        };
        let after = why
            .split("after ")
            .nth(1)
            .and_then(|rest| rest.split(' ').next());
        let seconds: f64 = after.and_then(|s| s.parse().ok()).unwrap_or(0.0);
        let millis = (seconds * 1000.0) as u64;
        self.line.tell(Message::Lost {
            rank: rank as u32,
            loss,
            millis,
            step,
        });
    }

    /// Tells all others that this rank leaves.
    pub fn leave(&self) {
        let started = self.line.shared.started.load(Ordering::Relaxed);
        self.line.tell(Message::Left {
            rank: self.line.rank as u32,
            started,
        });
    }

    /// Ends the thread and closes the connections.
    pub fn end(&self) {
        self.line.is_over.store(true, Ordering::Relaxed);
    }
}

/// The rank of a connection that begins with the token.
fn greeted(mut stream: &TcpStream, token: Token) -> Option<usize> {
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
    let mut bytes = [0; MESSAGE];
    stream.read_exact(&mut bytes).ok()?;
    match Message::from_bytes(&bytes)? {
        Message::Hello {
            rank,
            token: theirs,
        } if theirs == token => usize::try_from(rank).ok(),
        _ => None,
    }
}

impl Line {
    fn positions(&self) -> MutexGuard<'_, Vec<Option<Position>>> {
        self.positions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends to all connections. One that fails is seen by the reader.
    fn tell(&self, message: Message) {
        let writers = self.writers.lock().unwrap_or_else(PoisonError::into_inner);
        for mut writer in writers.iter() {
            let _ = writer.write(&message.to_bytes());
        }
    }

    /// Reads all connections and sends this rank's position, until the lifeline ends.
    fn watch(&self, mut links: Vec<Link>) {
        let mut beat = Instant::now();
        let mut polled: Vec<libc::pollfd> = Vec::with_capacity(links.len());
        while !self.is_over.load(Ordering::Relaxed) {
            polled.clear();
            polled.extend(links.iter().map(|link| libc::pollfd {
                fd: link.stream.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            }));
            let left = beat.saturating_duration_since(Instant::now()).min(BEAT);
            // SAFETY: the array is valid for its length, and its descriptors are open.
            unsafe {
                let count = polled.len() as libc::nfds_t;
                libc::poll(polled.as_mut_ptr(), count, left.as_millis() as i32 + 1);
            }
            links.retain_mut(|link| self.read(link));
            let now = Instant::now();
            if let Some(late) = now.checked_duration_since(beat) {
                beat = now + BEAT;
                self.beat(&mut links, late);
            }
        }
    }

    /// Sends this rank's position, and looks for silent ranks. The time by which it is `late`, when
    /// this rank itself was stopped, is no silence of others.
    fn beat(&self, links: &mut [Link], late: Duration) {
        for link in &mut *links {
            link.heard += late.min(link.heard.elapsed());
        }
        let (rank, step) = (self.rank, self.shared.step.load(Ordering::Relaxed));
        let own = Position {
            step,
            started: self.shared.started.load(Ordering::Relaxed),
        };
        let mut positions = self.positions();
        positions[rank] = Some(own);
        let slowest = if rank == 0 {
            let known = positions
                .iter()
                .enumerate()
                .filter_map(|(rank, at)| Some((rank, (*at)?)));
            known
                .min_by_key(|(_, at)| at.started)
                .unwrap_or((rank, own))
        } else {
            (rank, own)
        };
        drop(positions);
        let (rank, Position { step, started }) = slowest;
        self.tell(Message::Beat {
            rank: rank as u32,
            step,
            started,
        });
        let silent = links
            .iter()
            .find(|link| !link.has_left && link.heard.elapsed() > self.silence);
        if let Some(link) = silent {
            let millis = link.heard.elapsed().as_millis() as u64;
            self.lost(link.peer as u32, Loss::Silent, millis, 0);
        }
    }

    /// Reads the messages of a connection that have arrived; false if it has ended.
    fn read(&self, link: &mut Link) -> bool {
        loop {
            match (&link.stream).read(&mut link.bytes[link.filled..]) {
                Ok(0) => break,
                Ok(count) => {
                    link.heard = Instant::now();
                    link.filled += count;
                    if link.filled == MESSAGE {
                        link.filled = 0;
                        if let Some(message) = Message::from_bytes(&link.bytes) {
                            self.heard(link, message);
                        }
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return true,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        if !link.has_left && !self.is_over.load(Ordering::Relaxed) {
            self.lost(link.peer as u32, Loss::Ended, 0, 0);
        }
        false
    }

    fn heard(&self, link: &mut Link, message: Message) {
        match message {
            Message::Hello { .. } => {}
            Message::Beat {
                rank,
                step,
                started,
            } => {
                let mut positions = self.positions();
                if self.rank != 0 {
                    positions.fill(None);
                }
                if let Some(at) = positions.get_mut(rank as usize) {
                    *at = Some(Position { step, started });
                }
            }
            Message::Lost {
                rank,
                loss,
                millis,
                step,
            } => self.lost(rank, loss, millis, step),
            Message::Left { rank, started } => {
                link.has_left |= rank as usize == link.peer;
                let mut state = self.shared.state();
                let this = (started, rank as usize);
                state.left = Some(state.left.map_or(this, |other| other.min(this)));
                state.leavers += 1;
                drop(state);
                self.shared.changed.notify_all();
                if self.rank == 0 {
                    self.tell(message);
                }
            }
        }
    }

    /// Notes a loss. Rank 0 tells all others first, so that they know of it before they could see
    /// rank 0 end.
    fn lost(&self, rank: u32, loss: Loss, millis: u64, step: u64) {
        if self.rank == 0 {
            self.tell(Message::Lost {
                rank,
                loss,
                millis,
                step,
            });
        }
        self.shared.lose(rank as usize, loss.why(millis, step));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_their_bytes_and_others_are_ignored() {
        let token = std::array::from_fn(|i| i as u8 * 3);
        for message in [
            Message::Hello { rank: 7, token },
            Message::Beat {
                rank: 1,
                step: u64::MAX,
                started: 3,
            },
            Message::Lost {
                rank: 2,
                loss: Loss::Late,
                millis: 2500,
                step: 9,
            },
            Message::Left {
                rank: 3,
                started: 1 << 40,
            },
        ] {
            assert_eq!(Message::from_bytes(&message.to_bytes()), Some(message));
        }
        for first in 0..=u8::MAX {
            for second in 0..=u8::MAX {
                let mut bytes = [0xff; MESSAGE];
                (bytes[0], bytes[1]) = (first, second);
                let known = matches!(first, 1 | 2 | 4) || (first == 3 && second < 5);
                assert_eq!(
                    Message::from_bytes(&bytes).is_some(),
                    known,
                    "{first} {second}"
                );
            }
        }
    }

    #[test]
    fn a_silent_rank_is_lost_after_the_patience() {
        let silence = Duration::from_secs(300);
        // Whether a rank is lost that was heard so long ago, by a beat that comes late by so much.
        let is_lost = |seconds: u64, late: u64| {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let address = listener.local_addr().expect("an address");
            let line = Line {
                rank: 1,
                shared: Arc::new(Shared::new()),
                writers: Mutex::default(),
                positions: Mutex::new(vec![None; 2]),
                silence,
                is_over: AtomicBool::new(false),
            };
            let mut link = Link {
                peer: 0,
                stream: TcpStream::connect(address).expect("connected"),
                bytes: [0; MESSAGE],
                filled: 0,
                heard: Instant::now() - Duration::from_secs(seconds),
                has_left: false,
            };
            line.beat(std::slice::from_mut(&mut link), Duration::from_secs(late));
            line.shared.state().lost.clone().map(|(rank, why)| {
                assert!(why.starts_with("is gone (silent for "), "{why}");
                rank
            })
        };
        assert_eq!(is_lost(299, 0), None);
        assert_eq!(is_lost(301, 0), Some(0));
        assert_eq!(is_lost(900, 800), None);
    }

    #[test]
    fn a_peer_with_another_token_is_not_accepted() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let mut stranger = TcpStream::connect(address).expect("connected");
        let wrong = Message::Hello {
            rank: 1,
            token: [1; 16],
        };
        stranger.write_all(&wrong.to_bytes()).expect("sent");
        let (stream, _) = listener.accept().expect("accepted");
        assert_eq!(greeted(&stream, [2; 16]), None);
    }
}
