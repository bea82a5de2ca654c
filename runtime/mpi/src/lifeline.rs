//! The lifeline: connections that tell a rank that another has died, hangs, or has left.
//!
//! Every rank keeps a TCP connection to rank 0. A process that dies ends its connections, whatever
//! it was doing; rank 0 tells the others. Twice a second each rank says how many exchanges it has
//! arrived at, and rank 0 tells all of them, so that a rank that waits knows for whom.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::{JoinError, Mpi};

/// How often a rank says where it is.
const BEAT: Duration = Duration::from_millis(500);

/// The silence after which a rank counts as lost.
const SILENCE: Duration = Duration::from_secs(10);

/// How long ranks have to connect.
const CONNECT: Duration = Duration::from_secs(30);

/// Bytes of a message: kind, rank, number.
const MESSAGE: usize = 16;

/// The kinds of messages.
const ARRIVED: u32 = 1;
const LEFT: u32 = 2;
const DEAD: u32 = 3;
const SILENT: u32 = 4;

/// The secret by which ranks of one world know each other's connections.
type Token = [u8; 16];

/// What is known of the ranks.
struct Health {
    state: Mutex<State>,
    /// The exchanges that this rank has arrived at.
    own: AtomicU64,
    rank: usize,
}

struct State {
    /// The exchanges that each rank has arrived at.
    arrived: Vec<u64>,
    /// The first rank that is gone, and the reason.
    gone: Option<(usize, String)>,
    /// Ranks that have left at their end.
    left: Vec<bool>,
    /// The connections on which this rank writes, by rank.
    connections: Vec<(usize, TcpStream)>,
    /// Whether this rank is leaving.
    leaving: bool,
}

impl Health {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a rank is gone, and tells the others if this is rank 0.
    fn lose(&self, rank: usize, kind: u32) {
        let mut state = self.lock();
        if state.left[rank] || state.leaving {
            return;
        }
        let why = match kind {
            LEFT => "it has left the world",
            SILENT => "it has been silent for 10 s",
            _ => "its connection has ended",
        };
        if kind == LEFT {
            state.left[rank] = true;
        }
        state.gone.get_or_insert((rank, why.to_string()));
        if self.rank == 0 {
            tell(&state.connections, message(kind, rank, 0));
        }
    }

    /// Reads what another rank says until it ends.
    fn listen(&self, from: usize, mut connection: TcpStream) {
        let _ = connection.set_read_timeout(Some(SILENCE));
        let mut bytes = [0; MESSAGE];
        loop {
            if let Err(error) = connection.read_exact(&mut bytes) {
                let silent = matches!(
                    error.kind(),
                    std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                );
                return self.lose(from, if silent { SILENT } else { DEAD });
            }
            let (kind, rank, number) = parts(&bytes);
            let mut state = self.lock();
            // Rank 0 speaks of all ranks, the others of themselves.
            if rank >= state.arrived.len() || (from != 0 && rank != from) {
                drop(state);
                return self.lose(from, DEAD);
            }
            match kind {
                ARRIVED => state.arrived[rank] = state.arrived[rank].max(number),
                _ => {
                    drop(state);
                    self.lose(rank, kind);
                }
            }
        }
    }

    /// Says where this rank is, and as rank 0 where all are.
    fn beat(&self) {
        let mut state = self.lock();
        let own = self.own.load(Ordering::SeqCst);
        state.arrived[self.rank] = own;
        if self.rank > 0 {
            return tell(&state.connections, message(ARRIVED, self.rank, own));
        }
        for (rank, &number) in state.arrived.iter().enumerate() {
            tell(&state.connections, message(ARRIVED, rank, number));
        }
    }
}

/// Writes a message on all connections. A connection that has ended is noticed by its reader.
fn tell(connections: &[(usize, TcpStream)], message: [u8; MESSAGE]) {
    for (_, connection) in connections {
        let _ = (&mut &*connection).write_all(&message);
    }
}

fn message(kind: u32, rank: usize, number: u64) -> [u8; MESSAGE] {
    let mut bytes = [0; MESSAGE];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[4..8].copy_from_slice(&(rank as u32).to_le_bytes());
    bytes[8..].copy_from_slice(&number.to_le_bytes());
    bytes
}

fn parts(bytes: &[u8; MESSAGE]) -> (u32, usize, u64) {
    let [mut kind, mut rank] = [[0; 4]; 2];
    let mut number = [0; 8];
    kind.copy_from_slice(&bytes[..4]);
    rank.copy_from_slice(&bytes[4..8]);
    number.copy_from_slice(&bytes[8..]);
    let [kind, rank] = [kind, rank].map(u32::from_le_bytes);
    (kind, rank as usize, u64::from_le_bytes(number))
}

/// A rank's end of the connections.
pub(crate) struct Lifeline {
    health: Arc<Health>,
}

impl Lifeline {
    /// Connects the ranks of a world that has no lifeline yet.
    pub fn tie(mpi: &Mpi) -> Result<Lifeline, JoinError> {
        let failed = |e: std::io::Error| JoinError::Meeting(format!("lifeline: {e}"));
        // Every rank says its host, and rank 0 its port and the token.
        let mut own = [0u8; 280];
        let host = host();
        own[..host.len().min(256)].copy_from_slice(&host[..host.len().min(256)]);
        let mut token: Token = [0; 16];
        let mut listener = None;
        let hosts = mpi.meet(&own)?;
        let local = hosts.chunks_exact(own.len()).all(|other| other == own);
        if mpi.rank == 0 {
            let from = if local {
                Ipv4Addr::LOCALHOST
            } else {
                Ipv4Addr::UNSPECIFIED
            };
            let bound = TcpListener::bind((from, 0)).map_err(failed)?;
            let port = bound.local_addr().map_err(failed)?.port();
            own[256..258].copy_from_slice(&port.to_le_bytes());
            std::fs::File::open("/dev/urandom")
                .and_then(|mut random| random.read_exact(&mut token))
                .map_err(failed)?;
            own[258..274].copy_from_slice(&token);
            listener = Some(bound);
        }
        let all = mpi.meet(&own)?;
        let first = &all[..own.len()];
        token.copy_from_slice(&first[258..274]);
        let port = u16::from_le_bytes([first[256], first[257]]);
        let connections = match listener {
            Some(listener) => accept(&listener, mpi.ranks, &token)?,
            None => {
                let name = first[..256].split(|b| *b == 0).next().unwrap_or_default();
                let name = String::from_utf8_lossy(name).into_owned();
                let address = if local {
                    IpAddr::V4(Ipv4Addr::LOCALHOST).to_string()
                } else {
                    name
                };
                vec![(
                    0,
                    connect(&address, port, mpi.rank, &token).map_err(failed)?,
                )]
            }
        };
        let mut readers = Vec::new();
        for (rank, connection) in &connections {
            connection.set_nodelay(true).map_err(failed)?;
            connection.set_write_timeout(Some(BEAT)).map_err(failed)?;
            readers.push((*rank, connection.try_clone().map_err(failed)?));
        }
        let health = Arc::new(Health {
            state: Mutex::new(State {
                arrived: vec![0; mpi.ranks],
                gone: None,
                left: vec![false; mpi.ranks],
                connections,
                leaving: false,
            }),
            own: AtomicU64::new(0),
            rank: mpi.rank,
        });
        for (rank, connection) in readers {
            let health = Arc::clone(&health);
            spawn(move || health.listen(rank, connection)).map_err(failed)?;
        }
        let beating = Arc::downgrade(&health);
        spawn(move || {
            while let Some(health) = beating.upgrade() {
                if health.lock().leaving {
                    return;
                }
                health.beat();
                drop(health);
                std::thread::sleep(BEAT);
            }
        })
        .map_err(failed)?;
        Ok(Lifeline { health })
    }

    /// Notes that this rank has arrived at an exchange.
    pub fn arrived(&self, number: u64) {
        self.health.own.store(number, Ordering::SeqCst);
    }

    /// The first rank that is gone, and the reason.
    pub fn gone(&self) -> Option<(usize, String)> {
        self.health.lock().gone.clone()
    }

    /// The ranks that have not arrived at an exchange, once all have said where they are.
    pub fn missing(&self, number: u64) -> Vec<usize> {
        self.health.beat();
        std::thread::sleep(BEAT + BEAT / 4);
        let state = self.health.lock();
        let missing = (0..state.arrived.len()).filter(|&rank| state.arrived[rank] < number);
        missing.filter(|&rank| rank != self.health.rank).collect()
    }
}

impl Drop for Lifeline {
    fn drop(&mut self) {
        let mut state = self.health.lock();
        state.leaving = true;
        tell(&state.connections, message(LEFT, self.health.rank, 0));
        for (_, connection) in &state.connections {
            // What was written is sent before the end.
            let _ = connection.shutdown(std::net::Shutdown::Write);
        }
    }
}

fn spawn(work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let thread = std::thread::Builder::new().name("slabwise-lifeline".into());
    thread.spawn(work).map(drop)
}

/// The connections of all ranks but the first.
fn accept(
    listener: &TcpListener,
    ranks: usize,
    token: &Token,
) -> Result<Vec<(usize, TcpStream)>, JoinError> {
    let failed = |e: std::io::Error| JoinError::Meeting(format!("lifeline: {e}"));
    listener.set_nonblocking(true).map_err(failed)?;
    let started = std::time::Instant::now();
    let mut connections: Vec<(usize, TcpStream)> = Vec::new();
    while connections.len() + 1 < ranks {
        let (mut connection, _) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                if started.elapsed() > CONNECT {
                    let why = format!(
                        "lifeline: {} of {ranks} ranks have connected within {} s",
                        connections.len() + 1,
                        CONNECT.as_secs()
                    );
                    return Err(JoinError::Meeting(why));
                }
                std::thread::sleep(Duration::from_millis(2));
                continue;
            }
            Err(e) => return Err(failed(e)),
        };
        // A stranger's connection is dropped.
        let mut hello = [0; 20];
        let known = connection.set_nonblocking(false).is_ok()
            && connection.set_read_timeout(Some(BEAT)).is_ok()
            && connection.read_exact(&mut hello).is_ok()
            && hello[..16] == token[..];
        let rank = u32::from_le_bytes([hello[16], hello[17], hello[18], hello[19]]) as usize;
        let fresh = (1..ranks).contains(&rank) && connections.iter().all(|(r, _)| *r != rank);
        if known && fresh {
            connections.push((rank, connection));
        }
    }
    Ok(connections)
}

fn connect(host: &str, port: u16, rank: usize, token: &Token) -> std::io::Result<TcpStream> {
    let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
    let mut last = std::io::Error::other(format!("the host {host:?} has no address"));
    for address in addresses {
        match TcpStream::connect_timeout(&address, CONNECT) {
            Ok(mut connection) => {
                let mut hello = [0; 20];
                hello[..16].copy_from_slice(token);
                hello[16..].copy_from_slice(&(rank as u32).to_le_bytes());
                connection.write_all(&hello)?;
                return Ok(connection);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The name of this host.
fn host() -> Vec<u8> {
    let mut name = [0u8; 256];
    // SAFETY: the buffer is as long as is said.
    let status = unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    let end = name.iter().position(|b| *b == 0).unwrap_or(0);
    if status == 0 {
        name[..end].to_vec()
    } else {
        Vec::new()
    }
}
