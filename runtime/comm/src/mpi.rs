//! Worlds of processes that MPI has connected.

mod calls;
mod cores;
mod engine;
mod lifeline;

use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use slabwise_kernels::collective::Group;

use crate::engine::{Collective, Engine, Stop, with_copies};
use crate::launcher::{Family, Place};
use crate::library::{self, Surroundings};
use crate::near::{BOOT, Introduction, boot};
use crate::{Error, Result};
use calls::Calls;
use cores::Cores;
pub(crate) use engine::Mpi;
use lifeline::{Lifeline, Token};

/// The bytes by which rank 0 says where it listens.
const ADDRESS: usize = 16 + 2 + 4 + 64;
/// The most bytes of a host's name.
const HOST: usize = 64;
/// The bytes by which a rank says which machine it is on: its name, which another may have too, and
/// the identity of the running system.
const HOME: usize = HOST + BOOT;
/// The collectives of joining a world.
pub(crate) const JOINING: u64 = 4;

/// Loads the launcher's MPI and connects the ranks.
///
/// # Errors
/// If there is no library, or it is another one than the launcher's, or a rank does not answer.
pub(crate) fn join(
    family: Option<Family>,
    place: Option<Place>,
    variable: &str,
    (patience, near): (Duration, bool),
) -> Result<Mpi> {
    let (library, file) = library::open(&Surroundings::of_this_process(), family, None)?;
    let calls = Calls::bind(library, &file)?;
    let called = |family: Family| match family {
        Family::Mpich => "MPICH's",
        Family::OpenMpi => "Open MPI's",
    };
    let other = calls.family();
    if let Some(family) = family
        && family != other
    {
        return Err(Error::Join(format!(
            "this process was started by {} launcher ({variable} is set), but {} is {} library: \
             start it with the mpiexec beside that library, or name another one in SLABWISE_LIBMPI",
            called(family),
            file.display(),
            called(other)
        )));
    }
    let mpi = Mpi::start(calls, patience)?;
    if let Some(place) = place
        && (place.rank, place.size) != (mpi.rank, mpi.size)
    {
        let error = Error::Join(format!(
            "the launcher says that this is rank {} of {} ({variable}), but {} says rank {} of {}: \
             the launcher belongs to another MPI; use the mpiexec beside the library, or name \
             the launcher's library in SLABWISE_LIBMPI",
            place.rank,
            place.size,
            mpi.name(),
            mpi.rank,
            mpi.size
        ));
        mpi.close(true);
        return Err(error);
    }
    if mpi.size > 1 {
        connect(&mpi, patience, near)?;
    }
    Ok(mpi)
}

/// Connects the lifeline. Rank 0 says through MPI where it listens.
fn connect(mpi: &Mpi, patience: Duration, near: bool) -> Result<()> {
    let until = Instant::now() + patience.min(Duration::from_secs(86_400));
    let own = home();
    let mut near = Introduction::new(mpi.rank, near);
    let card = [&own[..], &Cores::own().to_bytes(), &near.to_bytes()].concat();
    let mut cards = vec![0; card.len() * mpi.size];
    run(mpi, 0, Collective::AllGather, &card, &mut cards, until)?;
    let cards = cards.chunks_exact(card.len());
    let is_one_machine = are_one_machine(cards.clone().map(|card| &card[..HOME]));
    let cores: Vec<_> = cards
        .clone()
        .map(|card| (&card[..HOME], Cores::of(&card[HOME..HOME + Cores::BYTES])))
        .collect();
    mpi.set_threads(cores::threads(&cores));
    let others: Vec<u8> = cards
        .flat_map(|card| &card[HOME + Cores::BYTES..])
        .copied()
        .collect();
    let failed = |e: std::io::Error| Error::Join(format!("rank 0 cannot listen: {e}"));
    let mut address = [0; ADDRESS];
    let mut listener = None;
    if mpi.rank == 0 {
        let interface = if is_one_machine {
            Ipv4Addr::LOCALHOST
        } else {
            Ipv4Addr::UNSPECIFIED
        };
        let listening = TcpListener::bind((interface, 0)).map_err(failed)?;
        let token = token().map_err(failed)?;
        address[..16].copy_from_slice(&token);
        let port = listening.local_addr().map_err(failed)?.port();
        address[16..18].copy_from_slice(&port.to_le_bytes());
        let ip = if is_one_machine {
            Ipv4Addr::LOCALHOST
        } else {
            own_address()
        };
        address[18..22].copy_from_slice(&ip.octets());
        address[22..].copy_from_slice(&own[..HOST]);
        listener = Some((listening, token));
    }
    run(
        mpi,
        1,
        Collective::Broadcast { root: 0 },
        &[],
        &mut address,
        until,
    )?;
    let shared = (Arc::clone(&mpi.shared), patience);
    let line = match listener {
        Some((listener, token)) => Lifeline::accept(&listener, token, mpi.size, shared, until)?,
        None => {
            let token: Token = std::array::from_fn(|i| address[i]);
            let port = u16::from_le_bytes([address[16], address[17]]);
            let ip = Ipv4Addr::new(address[18], address[19], address[20], address[21]);
            let name = String::from_utf8_lossy(&address[22..]);
            let mut addresses = vec![SocketAddr::from((ip, port))];
            if !is_one_machine {
                let named = (name.trim_end_matches('\0'), port).to_socket_addrs();
                addresses.extend(named.into_iter().flatten());
            }
            Lifeline::connect(&addresses, token, (mpi.rank, mpi.size), shared)?
        }
    };
    mpi.set_lifeline(line);
    // Windows are open on all ranks until all have looked.
    let own = near.look(&others);
    let mut seen = vec![0; own.len() * mpi.size];
    run(mpi, 2, Collective::AllGather, &own, &mut seen, until)?;
    // All have ended these collectives by messages before the first one that is near.
    run(mpi, 3, Collective::Barrier, &[], &mut [], until)?;
    if let Some(near) = near.meet(&seen) {
        mpi.set_near(near);
    }
    Ok(())
}

/// Runs a collective of joining a world.
fn run(
    mpi: &Mpi,
    seq: u64,
    collective: Collective,
    source: &[u8],
    destination: &mut [u8],
    until: Instant,
) -> Result<()> {
    let ended = with_copies(
        (collective, Group::all(mpi.size as u32)),
        source,
        destination,
        true,
        |job| {
            // SAFETY: the regions are not accessed before the collective has ended, and are never
            // freed if it fails.
            unsafe { mpi.start(seq, job) }.and_then(|()| mpi.wait(seq, until))
        },
    );
    ended.map_err(|stop| {
        Error::Join(match stop {
            Stop::Lost { rank, why } => {
                let size = mpi.size;
                format!("rank {rank} of {size} {why} while the ranks were connected")
            }
            Stop::Mismatch(why) | Stop::Failed(why) => {
                format!("the ranks could not be connected: {why}")
            }
        })
    })
}

/// Whether ranks of these homes are on one machine.
fn are_one_machine<'a>(mut homes: impl Iterator<Item = &'a [u8]>) -> bool {
    let first = homes.next();
    homes.all(|home| Some(home) == first)
}

/// The name of this machine, padded with zeros, and the identity of the running system, zeros where
/// the system does not tell.
fn home() -> [u8; HOME] {
    let mut name = [0_u8; HOME];
    if let Some(boot) = boot() {
        name[HOST..].copy_from_slice(&boot);
    }
    // SAFETY: the buffer is valid for its length; the last byte stays 0.
    unsafe { libc::gethostname(name.as_mut_ptr().cast(), HOST - 1) };
    name
}

/// The address from which this machine would reach others. No packet is sent.
fn own_address() -> Ipv4Addr {
    let local = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
        // Any address outside of the machine gives the interface of the default route.
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
        socket.local_addr()
    });
    match local.map(|address| address.ip()) {
        Ok(IpAddr::V4(ip)) => ip,
        _ => Ipv4Addr::LOCALHOST,
    }
}

fn token() -> std::io::Result<Token> {
    let mut token = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut token)?;
    Ok(token)
}

/// The launcher of processes that belongs to a library, the library, and its family.
pub(crate) fn launcher_of_library(named: Option<&Path>) -> Result<(PathBuf, PathBuf, Family)> {
    let (library, file) = library::open(&Surroundings::of_this_process(), None, named)?;
    let calls = Calls::bind(library, &file)?;
    let is_open = calls.version().contains("Open MPI");
    let family = if is_open {
        Family::OpenMpi
    } else {
        Family::Mpich
    };
    Ok((library::mpiexec(&file, family), file, family))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_with_equal_names_are_told_apart() {
        let own = home();
        let mut other = own;
        assert!(are_one_machine([&own[..], &other[..]].into_iter()));
        other[HOME - 1] ^= 1;
        assert_eq!(own[..HOST], other[..HOST]);
        assert!(!are_one_machine([&own[..], &other[..]].into_iter()));
    }
}
