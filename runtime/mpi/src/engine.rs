//! The thread that calls MPI.
//!
//! It exchanges bytes in buffers of its own, a few mebibytes, so that a rank that stops waiting can
//! leave the thread, and a call that never returns, behind without anything of the rank's in its
//! hands.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use slabwise_kernels::collective::TransportError;

use crate::calls::Calls;
use crate::launched::Launched;
use crate::library::find;
use crate::{JoinError, Mpi};

/// The most bytes of one buffer.
const BUFFER: usize = 4 << 20;

/// How long the thread asks for the end of an exchange without pause. An exchange on an idle
/// machine takes a few microseconds; on a busy one, asking keeps the other ranks from their work.
const SPIN: Duration = Duration::from_micros(20);

/// The pauses between questions after that: the first, and the longest.
const PAUSES: [Duration; 2] = [Duration::from_micros(20), Duration::from_micros(200)];

/// How often a rank that waits looks at its lifeline.
const LOOK: Duration = Duration::from_millis(20);

/// How long the others have to answer a rank that leaves.
const LEAVE: Duration = Duration::from_secs(5);

/// An exchange of `part` bytes with every rank, and its buffers.
struct Job {
    part: usize,
    to_all: bool,
    buffers: Buffers,
}

#[derive(Default)]
struct Buffers {
    send: Vec<u8>,
    receive: Vec<u8>,
}

enum Request {
    Exchange(Job),
    Leave,
}

/// The rank's side of the thread.
pub(crate) struct Engine {
    channels: Mutex<Channels>,
    abandoned: Arc<AtomicBool>,
}

struct Channels {
    requests: Sender<Request>,
    answers: Receiver<(Result<(), String>, Buffers)>,
    /// Between exchanges.
    buffers: Option<Buffers>,
    /// The number of exchanges so far.
    number: u64,
    lost: Option<TransportError>,
}

impl Engine {
    /// Starts the thread, which joins the world of the launcher.
    pub fn start(launched: &Launched) -> Result<Engine, JoinError> {
        let files = find(launched.launcher);
        let (requests, jobs) = channel();
        let (results, answers) = channel();
        let (joined, world) = channel();
        let abandoned = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&abandoned);
        let expected = launched.clone();
        let thread = std::thread::Builder::new().name("slabwise-mpi".into());
        let run = move || match open(files, &expected) {
            Ok(calls) => {
                let _ = joined.send(Ok(()));
                serve(&calls, &jobs, &results, &flag, expected.ranks);
            }
            Err(error) => {
                let _ = joined.send(Err(error));
            }
        };
        let no_thread = |e: std::io::Error| JoinError::Meeting(e.to_string());
        thread.spawn(run).map_err(no_thread)?;
        let ended = |_| Err(JoinError::Meeting("MPI has ended its thread".into()));
        world.recv().unwrap_or_else(ended)?;
        Ok(Engine {
            channels: Mutex::new(Channels {
                requests,
                answers,
                buffers: Some(Buffers::default()),
                number: 0,
                lost: None,
            }),
            abandoned,
        })
    }

    /// Exchanges `part` bytes with every rank, in as many pieces as its buffers need.
    pub fn exchange(
        &self,
        mpi: &Mpi,
        part: usize,
        to_all: bool,
        send: &[u8],
        receive: &mut [u8],
    ) -> Result<(), TransportError> {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        let channels = &mut *channels;
        if let Some(lost) = &channels.lost {
            return Err(lost.clone());
        }
        channels.number += 1;
        let most = (BUFFER / mpi.ranks).max(1);
        let mut from = 0;
        while from < part {
            let to = part.min(from + most);
            let piece = from..to;
            let length = piece.len();
            let mut buffers = channels.buffers.take().unwrap_or_default();
            buffers.send.clear();
            if to_all {
                for rank in 0..mpi.ranks {
                    let row = &send[rank * part..(rank + 1) * part];
                    buffers.send.extend_from_slice(&row[piece.clone()]);
                }
            } else {
                buffers.send.extend_from_slice(&send[piece.clone()]);
            }
            buffers.receive.resize(length * mpi.ranks, 0);
            let job = Job {
                part: length,
                to_all,
                buffers,
            };
            let done = match channels.requests.send(Request::Exchange(job)) {
                Ok(()) => self.wait(channels, mpi),
                Err(_) => Err("MPI has ended its thread".to_string()),
            };
            match done {
                Ok(buffers) => {
                    for rank in 0..mpi.ranks {
                        let row = &mut receive[rank * part..(rank + 1) * part];
                        let own = &buffers.receive[rank * length..(rank + 1) * length];
                        row[piece.clone()].copy_from_slice(own);
                    }
                    channels.buffers = Some(buffers);
                }
                Err(why) => {
                    let lost = TransportError(why);
                    channels.lost = Some(lost.clone());
                    self.abandoned.store(true, Ordering::SeqCst);
                    return Err(lost);
                }
            }
            from = to;
        }
        Ok(())
    }

    /// Waits for the end of an exchange, for as long as all ranks live and patience lasts.
    fn wait(&self, channels: &Channels, mpi: &Mpi) -> Result<Buffers, String> {
        let end = Instant::now() + mpi.patience;
        let number = channels.number;
        if let Some(lifeline) = &mpi.lifeline {
            lifeline.arrived(number);
        }
        loop {
            match channels.answers.recv_timeout(LOOK) {
                Ok((result, buffers)) => return result.map(|()| buffers),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err("MPI has ended its thread".into());
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            let gone = mpi.lifeline.as_ref().and_then(|lifeline| lifeline.gone());
            if let Some((rank, why)) = gone {
                return Err(format!(
                    "rank {rank} of {} is gone ({why}) while exchange {number} waits for it",
                    mpi.ranks
                ));
            }
            if Instant::now() >= end {
                let missing = mpi.lifeline.as_ref().map(|l| l.missing(number));
                let missing = missing.unwrap_or_default();
                let names: Vec<String> = missing.iter().map(usize::to_string).collect();
                let seconds = mpi.patience.as_secs_f64();
                return Err(match names.len() {
                    0 => format!(
                        "rank {} has waited {seconds:.1} s for the end of exchange {number}",
                        mpi.rank
                    ),
                    _ => format!(
                        "rank {} of {} has waited {seconds:.1} s for rank {} in exchange {number}",
                        mpi.rank,
                        mpi.ranks,
                        names.join(", ")
                    ),
                });
            }
        }
    }

    /// Leaves the world, if all ranks do; a rank that cannot is left to its process's end.
    pub fn finish(&self) {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if channels.lost.is_some() {
            return leave_at_once();
        }
        channels.lost = Some(TransportError("the world has ended".into()));
        let asked = channels.requests.send(Request::Leave).is_ok();
        if asked && channels.answers.recv_timeout(LEAVE).is_err() {
            leave_at_once();
        }
    }
}

/// Opens the first library that can be opened, and joins the world.
fn open(files: Vec<PathBuf>, launched: &Launched) -> Result<Calls, JoinError> {
    let named = std::env::var_os(crate::LIBRARY_VARIABLE).is_some_and(|v| !v.is_empty());
    let mut tried = Vec::new();
    for file in files {
        let calls = match Calls::open(&file) {
            Ok((calls, dialect)) => {
                log::debug!("{} speaks {dialect:?}", file.display());
                calls
            }
            Err(why) if named => return Err(JoinError::Unusable { file, why }),
            Err(why) => {
                tried.push(why);
                continue;
            }
        };
        let joined = calls.init();
        let (rank, ranks) = joined.map_err(|why| JoinError::Unusable {
            file: file.clone(),
            why,
        })?;
        if (rank, ranks) != (launched.rank, launched.ranks) {
            return Err(JoinError::OtherWorld {
                launcher: launched.launcher,
                expected_rank: launched.rank,
                expected_ranks: launched.ranks,
                file,
                rank,
                ranks,
            });
        }
        return Ok(calls);
    }
    let tried = match tried.len() {
        0 => String::new(),
        _ => format!(" ({})", tried.join("; ")),
    };
    Err(JoinError::Missing {
        launcher: launched.launcher,
        rank: launched.rank,
        ranks: launched.ranks,
        tried,
    })
}

/// Does what the rank requests, until it leaves.
fn serve(
    calls: &Calls,
    jobs: &Receiver<Request>,
    results: &Sender<(Result<(), String>, Buffers)>,
    abandoned: &AtomicBool,
    ranks: usize,
) {
    while let Ok(request) = jobs.recv() {
        let mut job = match request {
            Request::Exchange(job) => job,
            Request::Leave => {
                calls.finalize();
                let _ = results.send((Ok(()), Buffers::default()));
                return;
            }
        };
        let result = exchange(calls, &mut job, abandoned, ranks);
        if abandoned.load(Ordering::SeqCst) {
            // MPI may write these buffers at any time from here on.
            std::mem::forget(job);
            return;
        }
        if results.send((result, job.buffers)).is_err() {
            return;
        }
    }
}

fn exchange(
    calls: &Calls,
    job: &mut Job,
    abandoned: &AtomicBool,
    ranks: usize,
) -> Result<(), String> {
    let part = i32::try_from(job.part).map_err(|_| format!("a part of {} bytes", job.part))?;
    let Buffers { send, receive } = &mut job.buffers;
    let sent = job.part * if job.to_all { ranks } else { 1 };
    if send.len() != sent || receive.len() != job.part * ranks {
        return Err(format!(
            "an exchange of {} and {} bytes",
            send.len(),
            receive.len()
        ));
    }
    // SAFETY: the buffers have the bytes of all parts, as just checked. They belong to the job,
    // which this thread keeps until the request is done, or for ever.
    let mut request =
        unsafe { calls.start(job.to_all, part, send.as_ptr(), receive.as_mut_ptr()) }?;
    let started = Instant::now();
    let [mut pause, longest] = PAUSES;
    while !calls.done(&mut request)? {
        if abandoned.load(Ordering::SeqCst) {
            return Err("abandoned".into());
        }
        if started.elapsed() > SPIN {
            std::thread::sleep(pause);
            pause = longest.min(pause * 2);
        }
    }
    Ok(())
}

/// Makes the process end without the end of MPI, which would wait for a rank that is gone.
fn leave_at_once() {
    unsafe extern "C" fn end(status: libc::c_int, _: *mut libc::c_void) {
        // SAFETY: it ends the process.
        unsafe { libc::_exit(status) }
    }
    unsafe extern "C" {
        fn on_exit(
            call: unsafe extern "C" fn(libc::c_int, *mut libc::c_void),
            data: *mut libc::c_void,
        ) -> libc::c_int;
    }
    // SAFETY: the function outlives the process and uses no data. It runs before the handlers that
    // MPI has registered, because it is registered after them.
    unsafe { on_exit(end, std::ptr::null_mut()) };
}
