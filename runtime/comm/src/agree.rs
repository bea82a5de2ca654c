//! Agreement between ranks: facts, step headers.

use std::sync::PoisonError;

use crate::engine::{Collective, Job};
use crate::world::{Kind, World};
use crate::{Error, Result};

/// The most bytes of one rank's values in [`World::gather_values`].
const VALUES_MAX: u64 = 1 << 30;

/// The bytes of a header.
const BYTES: usize = 20;

/// The state of a rank at the beginning of a step, which travels as 20 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// The hash of the program.
    pub program: u64,
    /// The step.
    pub step: u64,
    /// 0 if the rank can run the step; else the code of its fault.
    pub fault: u32,
}

impl Header {
    /// Its bytes, in little-endian order.
    pub fn to_bytes(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(&self.program.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.step.to_le_bytes());
        bytes[16..].copy_from_slice(&self.fault.to_le_bytes());
        bytes
    }

    /// The header with these bytes.
    pub fn from_bytes(bytes: &[u8; BYTES]) -> Header {
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        Header {
            program: long(0),
            step: long(8),
            fault: u32::from_le_bytes(std::array::from_fn(|i| bytes[16 + i])),
        }
    }
}

impl World {
    /// Gathers values of any length, by rank.
    ///
    /// # Errors
    /// If a rank is lost, or a value has more than 1 GiB.
    pub fn gather_values(&self, name: &str, value: &[u8]) -> Result<Vec<Vec<u8>>> {
        let lengths = self.gather_small(name, &(value.len() as u64).to_le_bytes())?;
        let lengths: Vec<u64> = lengths
            .chunks_exact(8)
            .map(|b| u64::from_le_bytes(std::array::from_fn(|i| b[i])))
            .collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if longest > VALUES_MAX {
            return Err(Error::Size(format!(
                "\"{name}\": a rank gives {longest} bytes, at most {VALUES_MAX} can be gathered"
            )));
        }
        let mut padded = value.to_vec();
        padded.resize(longest as usize, 0);
        let all = self.gather_small(name, &padded)?;
        let value = |(rank, len): (usize, &u64)| {
            let start = rank * longest as usize;
            all[start..start + *len as usize].to_vec()
        };
        Ok(lengths.iter().enumerate().map(value).collect())
    }

    /// Gathers values of one length, by rank, counted as control traffic.
    fn gather_small(&self, name: &str, value: &[u8]) -> Result<Vec<u8>> {
        let mut all = vec![0; value.len() * self.size()];
        let gather = (Collective::AllGather, self.all());
        self.run(gather, name, value, &mut all, Some(Kind::Control))?;
        Ok(all)
    }

    /// Checks that named values are the same on all ranks.
    ///
    /// # Errors
    /// The same error on every rank, if one differs: it names the first value, in the order of
    /// rank 0, that is not the same everywhere, and the first rank that differs from the majority.
    pub fn agree<'a>(&self, facts: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Result<()> {
        let mut own = Vec::new();
        for (name, value) in facts {
            for part in [name.as_bytes(), value] {
                own.extend((part.len() as u64).to_le_bytes());
                own.extend(part);
            }
        }
        let all = self.gather_values("agreement", &own)?;
        let facts: Vec<Vec<(String, Vec<u8>)>> = all.iter().map(|one| facts_of(one)).collect();
        let Some((rank, own, theirs)) = first_difference(&facts) else {
            return Ok(());
        };
        let name = theirs
            .or(own)
            .map_or_else(String::new, |(name, _)| name.clone());
        let same_name = own.zip(theirs).is_none_or(|(a, b)| a.0 == b.0);
        let show = |fact: Option<&(String, Vec<u8>)>| match fact {
            Some((name, value)) if same_name => shown(value),
            Some((name, value)) => format!("{name} {}", shown(value)),
            None => "no such value".into(),
        };
        Err(Error::Disagree {
            rank,
            name,
            own: show(own),
            theirs: show(theirs),
        })
    }

    /// Exchanges the headers of a step, of which `each` is given that of every rank, by rank, and
    /// notes that the step begins. It allocates nothing after the first step.
    ///
    /// # Errors
    /// The same error on every rank if ranks run different programs or steps.
    pub fn header(&self, header: &Header, each: impl FnMut(Header)) -> Result<()> {
        self.begin_step(header.step);
        let mut bytes = self
            .0
            .headers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        bytes.resize(BYTES * (self.size() + 1), 0);
        let (own, all) = bytes.split_at_mut(BYTES);
        own.copy_from_slice(&header.to_bytes());
        let job = Job {
            collective: Collective::AllGather,
            group: self.all(),
            source: own.as_ptr(),
            source_len: own.len(),
            destination: all.as_mut_ptr(),
            destination_len: all.len(),
        };
        // SAFETY: the bytes are borrowed exclusively until the collective has ended; after an error
        // they are never freed if the engine may still use them.
        let ended = unsafe { self.start_job("header", job, Some(Kind::Control)) }
            .and_then(|ticket| self.finish(ticket, "header"));
        if let Err(error) = ended {
            if self.abandons() {
                std::mem::forget(std::mem::take(&mut *bytes));
            }
            return Err(error);
        }
        let headers = bytes[BYTES..].chunks_exact(BYTES);
        let headers = headers.map(|b| Header::from_bytes(&std::array::from_fn(|i| b[i])));
        let same = |h: Header| (h.program, h.step) == (header.program, header.step);
        if headers.clone().all(same) {
            headers.for_each(each);
            return Ok(());
        }
        let facts: Vec<Vec<(String, Vec<u8>)>> = headers
            .map(|h| {
                vec![
                    ("program".into(), h.program.to_be_bytes().to_vec()),
                    ("step".into(), h.step.to_string().into_bytes()),
                ]
            })
            .collect();
        match first_difference(&facts) {
            Some((rank, Some((name, own)), Some((_, theirs)))) => Err(Error::Disagree {
                rank,
                name: name.clone(),
                own: shown(own),
                theirs: shown(theirs),
            }),
            _ => Ok(()),
        }
    }
}

/// The named values of a rank. The bytes come from a rank of the same program; if they are cut off,
/// the list is as well.
fn facts_of(mut bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut part = || {
        let (len, rest) = bytes.split_at_checked(8)?;
        let len = u64::from_le_bytes(std::array::from_fn(|i| len[i]));
        let (part, rest) = rest.split_at_checked(usize::try_from(len).ok()?)?;
        bytes = rest;
        Some(part.to_vec())
    };
    std::iter::from_fn(|| Some((String::from_utf8_lossy(&part()?).into_owned(), part()?))).collect()
}

/// A fact of a rank, if it has one at this position.
type Fact<'a> = Option<&'a (String, Vec<u8>)>;

/// The first position at which the ranks' facts differ: the first rank that differs from the
/// majority, its fact and the majority's. Among equally frequent ones, the lowest rank's counts.
fn first_difference(facts: &[Vec<(String, Vec<u8>)>]) -> Option<(usize, Fact<'_>, Fact<'_>)> {
    let most = facts.iter().map(Vec::len).max()?;
    (0..most).find_map(|at| {
        let here: Vec<Fact<'_>> = facts.iter().map(|own| own.get(at)).collect();
        let first = *here.first()?;
        if here.iter().all(|fact| *fact == first) {
            return None;
        }
        let count = |fact: &Fact<'_>| here.iter().filter(|other| *other == fact).count();
        let majority = here.iter().rev().max_by_key(|fact| count(fact)).copied()?;
        let rank = here.iter().position(|fact| *fact != majority)?;
        Some((rank, here[rank], majority))
    })
}

/// A value in an error: text where it is text, else its first bytes.
fn shown(value: &[u8]) -> String {
    const MOST: usize = 40;
    match std::str::from_utf8(value) {
        Ok(text) if !text.is_empty() && !text.chars().any(char::is_control) => {
            let cut: String = text.chars().take(MOST).collect();
            if cut.len() < text.len() {
                format!("{cut}…")
            } else {
                cut
            }
        }
        _ => {
            let hex: String = value.iter().take(8).map(|b| format!("{b:02x}")).collect();
            let more = if value.len() > 8 { "…" } else { "" };
            format!("0x{hex}{more}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_their_bytes() {
        let header = Header {
            program: 0x0123_4567_89ab_cdef,
            step: 41,
            fault: 3,
        };
        assert_eq!(Header::from_bytes(&header.to_bytes()), header);
    }

    #[test]
    fn damaged_lists_of_facts_are_cut_off() {
        assert_eq!(facts_of(&[0xff; 20]), []);
        assert_eq!(facts_of(&[1, 0, 0]), []);
    }
}
