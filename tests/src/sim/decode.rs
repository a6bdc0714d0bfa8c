//! Decoding of bytes to actions, for a fuzzer.

use terrace_scheduler::{Config, Outcome};

use super::action::{Action, Opening, RequestOptions};
use super::simulation::overlaps;
use super::swarm::Swarm;
use crate::world::Damage;
use terrace_kit::Dice;

/// Largest number of actions.
const ACTIONS_MAX: usize = 400;

/// Decodes any bytes: the first four select the configuration, the rest are actions.
#[must_use]
pub fn decode(bytes: &[u8]) -> (Config, Vec<Action>) {
    let mut bytes = bytes.iter().copied();
    let seed = (0..4).fold(0, |seed, _| seed << 8 | u64::from(bytes.next().unwrap_or(0)));
    let mut config = Swarm::draw(&mut Dice::new(seed)).config;
    config.copies.load_back_overlaps = overlaps(seed);
    let mut actions = Vec::new();
    while let Some(code) = bytes.next()
        && actions.len() < ACTIONS_MAX
    {
        actions.push(decode_action(code, &mut bytes));
        // Engines plan after every event, sometimes late.
        if code & 0x80 == 0 {
            actions.push(Action::Plan);
        }
    }
    (config, actions)
}

fn decode_action(code: u8, bytes: &mut impl Iterator<Item = u8>) -> Action {
    let mut next = || bytes.next().unwrap_or(0);
    match code & 0x0F {
        0 | 1 => {
            let (opening, shape, length) = (next(), next(), next());
            Action::Submit {
                opening: match opening & 3 {
                    3 => Opening::Conversation((opening >> 2).into()),
                    text => Opening::Text(1 + 1000 * u32::from(text)),
                },
                opening_tokens: (length & 0x3F).into(),
                own_tokens: 1 + u32::from(shape & 7),
                own_start: 100_000 + 100 * u32::from(shape >> 3 & 3),
                new_tokens: 1 + u32::from(shape >> 5),
                priority: (opening >> 6).into(),
                namespace: (length >> 6).into(),
                stops_at_once: opening & 0x20 != 0,
                wishes: RequestOptions::default(),
                siblings: (code >> 5 & 3).into(),
            }
        }
        2 => Action::Abort(next().into()),
        3 | 4 => Action::Compute(u32::from(next() & 3) + 1),
        5 => Action::FailStep,
        6..=9 => Action::Report(next().into(), Outcome::Done),
        10 => Action::Report(next().into(), decode_fault(next())),
        11 => {
            let damage =
                [Damage::ShortRead, Damage::FlippedBit, Damage::WrongPage, Damage::StaleGeneration];
            Action::ReportDamaged(next().into(), next().into(), damage[usize::from(next() & 3)])
        }
        12 => Action::Repeat(next().into()),
        13 => Action::Wait(u64::from(next()) * 500),
        14 => Action::Clear,
        _ => Action::RestartL3(next() & 1 == 1),
    }
}

fn decode_fault(code: u8) -> Outcome {
    match code & 7 {
        0 => Outcome::Missing,
        1 => Outcome::Failed,
        2 => Outcome::Corrupt,
        3 => Outcome::TimedOut,
        4 => Outcome::CalledOff((code >> 3).into()),
        _ => Outcome::Partial((code >> 3).into()),
    }
}
