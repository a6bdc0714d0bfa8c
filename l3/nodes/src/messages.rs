//! Requests of clients and answers of nodes. `NODE-WIRE.md` draws the bytes.

use std::num::NonZeroU64;
use std::time::Duration;

use super::codec::{Malformed, Reader, Writer};
use super::membership::{Mark, Membership, Standing};
use terrace_cache::PrefixDigest;
use terrace_l3::{
    ExistsOptions, HEADER_BYTES, ObjectId, Owner, Pin, Place, Presence, PutOptions, Removal,
    Results, Served, StoreError, Stored,
};

/// Maximum size of the body of a frame.
pub const FRAME_BYTES_MAX: usize = 1 << 20;

/// Maximum number of objects in one message.
pub const IDS_MAX: usize = 4096;

/// Maximum number of owners per connection.
pub(crate) const OWNERS_MAX: usize = 1024;

/// An object and the length of its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Id of the object.
    pub id: ObjectId,
    /// Length of its payload in bytes.
    pub length: u64,
    /// Prefix that an offered object is the KV of. Requested objects have none: the client verifies
    /// it.
    pub prefix: Option<PrefixDigest>,
}

/// Length of the address of one end of an RDMA link, as the sides exchange it.
pub const LINK_BYTES: usize = 32;

/// Location from which a payload can be read by RDMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Afar {
    /// Address in the memory of the side that has the payload.
    pub address: u64,
    /// Registration key of that memory.
    pub key: u32,
}

/// A request of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Look up objects.
    Exists {
        /// Options of the lookup.
        options: ExistsOptions,
        /// Objects to look up.
        ids: Vec<ObjectId>,
    },
    /// Send objects.
    Get {
        /// Maximum wait for promotions.
        promotion_wait: Option<Duration>,
        /// Objects, each with its required length.
        wanted: Vec<Item>,
    },
    /// Offer objects.
    Put {
        /// Options of the put.
        options: PutOptions,
        /// Offered objects.
        offers: Vec<Item>,
    },
    /// Checksums of the payloads that were sent before.
    Checksums(Vec<u64>),
    /// Pin objects.
    Pin {
        /// The pin.
        pin: Pin,
        /// Objects to pin.
        ids: Vec<ObjectId>,
    },
    /// Unpin objects.
    Unpin {
        /// The pin.
        pin: Pin,
        /// Objects to unpin.
        ids: Vec<ObjectId>,
    },
    /// Remove objects.
    Remove {
        /// Strength of the removal.
        removal: Removal,
        /// Objects to remove.
        ids: Vec<ObjectId>,
    },
    /// Verify objects that the client could not verify, and remove damaged ones.
    Suspect(Vec<ObjectId>),
    /// Make everything durable.
    Flush,
    /// Ping.
    Ping,
    /// Register owners as connected: their pins last while the connection does.
    Owners(Vec<Owner>),
    /// Address of the client's end of an RDMA link.
    Link([u8; LINK_BYTES]),
    /// Lend objects, which the client reads over the link.
    Lend {
        /// Maximum wait for promotions.
        promotion_wait: Option<Duration>,
        /// Objects, each with its required length.
        wanted: Vec<Item>,
    },
    /// The client has read the lent objects.
    Taken,
    /// Offer objects, which the node reads over the link.
    Fetch {
        /// Options of the put.
        options: PutOptions,
        /// Offered objects.
        offers: Vec<Item>,
    },
    /// Checksums and locations of the payloads that the node wants.
    Places(Vec<(u64, Afar)>),
    /// Enter with the node's seat in the client's list. Precedes all other requests.
    Enter {
        /// The seat.
        seat: Mark,
        /// Store to join, if any.
        joins: Option<Joining>,
    },
}

/// Request that a node become a member of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joining {
    /// Id of the store.
    pub store: Mark,
    /// Digest of the addresses of the nodes in the list.
    pub addresses: Mark,
    /// Replace an existing membership, of this or another store.
    pub replaces: bool,
}

/// Answer for a requested object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parcel {
    /// The payload follows the message.
    Follows {
        /// Header that the payload must match.
        header: [u8; HEADER_BYTES],
        /// Tier that the payload comes from.
        served: Served,
    },
    /// Request it again: the node could not lend as many at once.
    Later,
    /// It cannot be read.
    Failed(StoreError),
}

/// Answer for an offered object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Offer {
    /// Send the payload.
    Wanted,
    /// The same object is present.
    There,
    /// Offer it again: the node could not accept as many at once.
    Later,
    /// It cannot be stored.
    Failed(StoreError),
}

/// Answer of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// First message: limits of the node.
    Welcome {
        /// Maximum object size.
        object_bytes_max: u64,
    },
    /// Answer to [`Request::Exists`].
    Presences(Results<Presence>),
    /// Answer to [`Request::Get`]; payloads follow.
    Parcels(Vec<Parcel>),
    /// Answer to [`Request::Put`]; payloads are expected.
    Offers(Vec<Offer>),
    /// Answer to [`Request::Checksums`].
    Stored(Results<Stored>),
    /// Answer to [`Request::Link`]: the node's end, if it has one. Answer to [`Request::Places`]:
    /// the payloads cannot be read.
    Linked(Option<[u8; LINK_BYTES]>),
    /// Answer to [`Request::Lend`], with the locations of the payloads that would follow.
    Lent(Vec<Parcel>, Vec<Afar>),
    /// Answer to [`Request::Enter`]: the resulting standing of the node.
    Entered(Result<Standing, StoreError>),
    /// Answer to all other requests.
    Done(Results<()>),
}

/// Statistics of a node's store that every answer carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauges {
    /// Number of the answer, to find the latest statistics.
    pub stamp: u64,
    /// In the order of `NODE-WIRE.md`.
    pub values: [u64; GAUGES],
}

/// Number of values.
pub const GAUGES: usize = 15;

/// An answer with the node's statistics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The statistics.
    pub gauges: Gauges,
    /// The answer.
    pub answer: Answer,
}

impl Request {
    /// Kind of the request's frame.
    #[must_use]
    pub fn kind(&self) -> u8 {
        match self {
            Self::Exists { .. } => 1,
            Self::Get { .. } => 2,
            Self::Put { .. } => 3,
            Self::Checksums(_) => 4,
            Self::Pin { .. } => 5,
            Self::Unpin { .. } => 6,
            Self::Remove { .. } => 7,
            Self::Suspect(_) => 8,
            Self::Flush => 9,
            Self::Ping => 10,
            Self::Link(_) => 11,
            Self::Lend { .. } => 12,
            Self::Taken => 13,
            Self::Fetch { .. } => 14,
            Self::Places(_) => 15,
            Self::Owners(_) => 16,
            Self::Enter { .. } => 17,
        }
    }

    /// Appends the body.
    pub fn encode(&self, body: &mut Vec<u8>) {
        let mut writer = Writer(body);
        match self {
            Self::Exists { options, ids } => {
                let ExistsOptions { prefetch_to_memory, lease } = *options;
                writer.u8(u8::from(prefetch_to_memory) | u8::from(lease) << 1);
                writer.ids(ids);
            }
            Self::Get { promotion_wait, wanted } | Self::Lend { promotion_wait, wanted } => {
                writer.u8(u8::from(promotion_wait.is_some()));
                writer.microseconds(promotion_wait.unwrap_or_default());
                write_items(&mut writer, wanted);
            }
            Self::Put { options, offers } | Self::Fetch { options, offers } => {
                match options.pin {
                    Some(pin) => write_pin(&mut writer, pin),
                    None => writer.u8(0),
                }
                writer.u8(u8::from(options.durable));
                write_items(&mut writer, offers);
                offers.iter().for_each(|offer| write_prefix(&mut writer, offer.prefix));
            }
            Self::Checksums(checksums) => {
                writer.u32(checksums.len() as u32);
                checksums.iter().for_each(|checksum| writer.u64(*checksum));
            }
            Self::Pin { pin, ids } | Self::Unpin { pin, ids } => {
                write_pin(&mut writer, *pin);
                writer.ids(ids);
            }
            Self::Remove { removal, ids } => {
                writer.u8(match removal {
                    Removal::Plain => 0,
                    Removal::Forced => 1,
                    Removal::Final => 2,
                });
                writer.ids(ids);
            }
            Self::Suspect(ids) => writer.ids(ids),
            Self::Link(end) => writer.bytes(end),
            Self::Places(places) => {
                writer.u32(places.len() as u32);
                for (checksum, place) in places {
                    writer.u64(*checksum);
                    write_afar(&mut writer, place);
                }
            }
            Self::Owners(owners) => {
                writer.u32(owners.len() as u32);
                owners.iter().for_each(|owner| writer.u64(owner.0.get()));
            }
            Self::Enter { seat, joins } => {
                writer.bytes(&seat.0);
                match joins {
                    None => writer.u8(0),
                    Some(Joining { store, addresses, replaces }) => {
                        writer.u8(1 + u8::from(*replaces));
                        writer.bytes(&store.0);
                        writer.bytes(&addresses.0);
                    }
                }
            }
            Self::Flush | Self::Ping | Self::Taken => {}
        }
    }

    /// Decodes the body of a frame of this kind.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn decode(kind: u8, body: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(body);
        let request = match kind {
            1 => {
                let flags = flags(&mut reader, "how to look", 0b11)?;
                let options =
                    ExistsOptions { prefetch_to_memory: flags & 1 != 0, lease: flags & 2 != 0 };
                Self::Exists { options, ids: ids(&mut reader)? }
            }
            2 | 12 => {
                let waits = flags(&mut reader, "whether to wait", 1)? != 0;
                let wait = reader.microseconds()?;
                if !waits && !wait.is_zero() {
                    return Err(Malformed::Unknown {
                        field: "a promotion wait without its flag",
                        value: 1,
                    });
                }
                let promotion_wait = waits.then_some(wait);
                let wanted = read_items(&mut reader)?;
                if kind == 2 {
                    Self::Get { promotion_wait, wanted }
                } else {
                    Self::Lend { promotion_wait, wanted }
                }
            }
            3 | 14 => {
                let pin = match reader.u8()? {
                    0 => None,
                    code => Some(read_pin(&mut reader, code)?),
                };
                let durable = flags(&mut reader, "durability", 1)? != 0;
                let options = PutOptions { pin, durable };
                let mut offers = read_items(&mut reader)?;
                for offer in &mut offers {
                    offer.prefix = read_prefix(&mut reader, &offer.id)?;
                }
                if kind == 3 {
                    Self::Put { options, offers }
                } else {
                    Self::Fetch { options, offers }
                }
            }
            4 => Self::Checksums(reader.list(8, IDS_MAX, Reader::u64)?),
            5 | 6 => {
                let code = reader.u8()?;
                let pin = read_pin(&mut reader, code)?;
                let ids = ids(&mut reader)?;
                if kind == 5 { Self::Pin { pin, ids } } else { Self::Unpin { pin, ids } }
            }
            7 => {
                let removal = match reader.u8()? {
                    0 => Removal::Plain,
                    1 => Removal::Forced,
                    2 => Removal::Final,
                    value => return Err(Malformed::Unknown { field: "a removal", value }),
                };
                Self::Remove { removal, ids: ids(&mut reader)? }
            }
            8 => Self::Suspect(ids(&mut reader)?),
            9 => Self::Flush,
            10 => Self::Ping,
            11 => Self::Link(reader.bytes()?),
            13 => Self::Taken,
            15 => {
                let entry = |reader: &mut Reader<'_>| Ok((reader.u64()?, read_afar(reader)?));
                Self::Places(reader.list(8 + AFAR_BYTES, IDS_MAX, entry)?)
            }
            16 => Self::Owners(reader.list(8, OWNERS_MAX, read_owner)?),
            17 => {
                let seat = Mark(reader.bytes()?);
                let joins = match reader.u8()? {
                    0 => None,
                    how @ 1..=2 => Some(Joining {
                        store: Mark(reader.bytes()?),
                        addresses: Mark(reader.bytes()?),
                        replaces: how == 2,
                    }),
                    value => return Err(Malformed::Unknown { field: "how to enter", value }),
                };
                Self::Enter { seat, joins }
            }
            other => return Err(Malformed::Kind(other)),
        };
        reader.end()?;
        Ok(request)
    }
}

/// Result code for "request again".
const LATER: u8 = 255;

impl Reply {
    /// Kind of the answer's frame.
    #[must_use]
    pub fn kind(&self) -> u8 {
        match &self.answer {
            Answer::Welcome { .. } => 128,
            Answer::Presences(_) => 129,
            Answer::Parcels(_) => 130,
            Answer::Offers(_) => 131,
            Answer::Stored(_) => 132,
            Answer::Done(_) => 133,
            Answer::Linked(_) => 134,
            Answer::Lent(..) => 135,
            Answer::Entered(_) => 136,
        }
    }

    /// Appends the body.
    pub fn encode(&self, body: &mut Vec<u8>) {
        let mut writer = Writer(body);
        writer.u64(self.gauges.stamp);
        self.gauges.values.iter().for_each(|value| writer.u64(*value));
        match &self.answer {
            Answer::Welcome { object_bytes_max } => writer.u64(*object_bytes_max),
            Answer::Presences(results) => {
                write_results(&mut writer, results, |writer, presence| {
                    writer.u8(match presence {
                        Presence::Absent => 0,
                        Presence::Present(Place::Memory) => 1,
                        Presence::Present(Place::Disk) => 2,
                    });
                });
            }
            Answer::Parcels(parcels) => write_parcels(&mut writer, parcels),
            Answer::Offers(offers) => {
                writer.u32(offers.len() as u32);
                for offer in offers {
                    match offer {
                        Offer::Wanted => writer.bytes(&[0, 0]),
                        Offer::There => writer.bytes(&[0, 1]),
                        Offer::Later => writer.u8(LATER),
                        Offer::Failed(error) => writer.error(error),
                    }
                }
            }
            Answer::Stored(results) => write_results(&mut writer, results, |writer, stored| {
                writer.u8(u8::from(*stored == Stored::AlreadyThere));
            }),
            Answer::Done(results) => write_results(&mut writer, results, |_, ()| {}),
            Answer::Linked(end) => {
                writer.u8(u8::from(end.is_some()));
                writer.bytes(end.as_ref().map_or(&[], |end| &end[..]));
            }
            Answer::Lent(parcels, places) => {
                write_parcels(&mut writer, parcels);
                writer.u32(places.len() as u32);
                places.iter().for_each(|place| write_afar(&mut writer, place));
            }
            Answer::Entered(Ok(standing)) => write_standing(&mut writer, standing),
            Answer::Entered(Err(error)) => writer.error(error),
        }
    }

    /// Decodes the body of a frame of this kind.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn decode(kind: u8, body: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(body);
        let mut gauges = Gauges { stamp: reader.u64()?, ..Gauges::default() };
        for value in &mut gauges.values {
            *value = reader.u64()?;
        }
        let answer = match kind {
            128 => Answer::Welcome { object_bytes_max: reader.u64()? },
            129 => Answer::Presences(results(&mut reader, |reader| match reader.u8()? {
                0 => Ok(Presence::Absent),
                1 => Ok(Presence::Present(Place::Memory)),
                2 => Ok(Presence::Present(Place::Disk)),
                value => Err(Malformed::Unknown { field: "a presence", value }),
            })?),
            130 => Answer::Parcels(read_parcels(&mut reader)?),
            131 => Answer::Offers(reader.list(1, IDS_MAX, |reader| match reader.u8()? {
                0 => match flags(reader, "an offer", 1)? {
                    0 => Ok(Offer::Wanted),
                    _ => Ok(Offer::There),
                },
                LATER => Ok(Offer::Later),
                code => Ok(Offer::Failed(reader.error(code)?)),
            })?),
            132 => Answer::Stored(results(&mut reader, |reader| {
                let there = flags(reader, "a put", 1)? != 0;
                Ok(if there { Stored::AlreadyThere } else { Stored::New })
            })?),
            133 => Answer::Done(results(&mut reader, |_| Ok(()))?),
            134 => Answer::Linked(match flags(&mut reader, "whether there is a link", 1)? {
                0 => None,
                _ => Some(reader.bytes()?),
            }),
            135 => Answer::Lent(
                read_parcels(&mut reader)?,
                reader.list(AFAR_BYTES, IDS_MAX, read_afar)?,
            ),
            136 => Answer::Entered(match reader.u8()? {
                0 => Ok(read_standing(&mut reader)?),
                code => Err(reader.error(code)?),
            }),
            other => return Err(Malformed::Kind(other)),
        };
        reader.end()?;
        Ok(Self { gauges, answer })
    }
}

fn write_parcels(writer: &mut Writer<'_>, parcels: &[Parcel]) {
    writer.u32(parcels.len() as u32);
    for parcel in parcels {
        match parcel {
            Parcel::Follows { header, served } => {
                writer.u8(0);
                let disk = u8::from(served.place == Place::Disk);
                writer.u8(disk | u8::from(served.waited) << 1);
                writer.bytes(header);
            }
            Parcel::Later => writer.u8(LATER),
            Parcel::Failed(error) => writer.error(error),
        }
    }
}

fn read_parcels(reader: &mut Reader<'_>) -> Result<Vec<Parcel>, Malformed> {
    reader.list(1, IDS_MAX, |reader| match reader.u8()? {
        0 => {
            let flags = flags(reader, "a place", 0b11)?;
            let place = if flags & 1 != 0 { Place::Disk } else { Place::Memory };
            let served = Served { place, waited: flags & 2 != 0 };
            Ok(Parcel::Follows { header: reader.bytes()?, served })
        }
        LATER => Ok(Parcel::Later),
        code => Ok(Parcel::Failed(reader.error(code)?)),
    })
}

fn write_standing(writer: &mut Writer<'_>, standing: &Standing) {
    let Standing { birth, is_durable, member } = standing;
    writer.u8(0);
    writer.bytes(&birth.0);
    writer.u8(u8::from(*is_durable) | u8::from(member.is_some()) << 1);
    if let Some(Membership { store, seat, addresses }) = member {
        writer.bytes(&store.0);
        writer.bytes(&seat.0);
        writer.bytes(&addresses.0);
    }
}

fn read_standing(reader: &mut Reader<'_>) -> Result<Standing, Malformed> {
    let birth = Mark(reader.bytes()?);
    let flags = flags(reader, "what a node is", 0b11)?;
    let member = match flags & 2 {
        0 => None,
        _ => Some(Membership {
            store: Mark(reader.bytes()?),
            seat: Mark(reader.bytes()?),
            addresses: Mark(reader.bytes()?),
        }),
    };
    Ok(Standing { birth, is_durable: flags & 1 != 0, member })
}

const AFAR_BYTES: usize = 12;

fn write_afar(writer: &mut Writer<'_>, place: &Afar) {
    writer.u64(place.address);
    writer.u32(place.key);
}

fn read_afar(reader: &mut Reader<'_>) -> Result<Afar, Malformed> {
    Ok(Afar { address: reader.u64()?, key: reader.u32()? })
}

fn write_results<T>(
    writer: &mut Writer<'_>,
    results: &Results<T>,
    mut write: impl FnMut(&mut Writer<'_>, &T),
) {
    writer.u32(results.len() as u32);
    for result in results {
        match result {
            Ok(value) => {
                writer.u8(0);
                write(writer, value);
            }
            Err(error) => writer.error(error),
        }
    }
}

fn results<T>(
    reader: &mut Reader<'_>,
    mut value: impl FnMut(&mut Reader<'_>) -> Result<T, Malformed>,
) -> Result<Results<T>, Malformed> {
    reader.list(1, IDS_MAX, |reader| match reader.u8()? {
        0 => Ok(Ok(value(reader)?)),
        code => Ok(Err(reader.error(code)?)),
    })
}

fn ids(reader: &mut Reader<'_>) -> Result<Vec<ObjectId>, Malformed> {
    reader.list(ObjectId::BYTES, IDS_MAX, Reader::id)
}

fn write_items(writer: &mut Writer<'_>, list: &[Item]) {
    writer.u32(list.len() as u32);
    for Item { id, length, .. } in list {
        writer.id(id);
        writer.u64(*length);
    }
}

fn read_items(reader: &mut Reader<'_>) -> Result<Vec<Item>, Malformed> {
    let entry = |reader: &mut Reader<'_>| {
        Ok(Item { id: reader.id()?, length: reader.u64()?, prefix: None })
    };
    reader.list(ObjectId::BYTES + 8, IDS_MAX, entry)
}

/// Stands for no prefix: no digest has this value.
const NO_PREFIX: [u8; PrefixDigest::BYTES] = [0; PrefixDigest::BYTES];

fn write_prefix(writer: &mut Writer<'_>, prefix: Option<PrefixDigest>) {
    writer.bytes(&prefix.map_or(NO_PREFIX, PrefixDigest::to_bytes));
}

fn read_prefix(reader: &mut Reader<'_>, id: &ObjectId) -> Result<Option<PrefixDigest>, Malformed> {
    let bytes = reader.bytes()?;
    match bytes != NO_PREFIX {
        true if id.generation > 0 => {
            Err(Malformed::Unknown { field: "the prefix of an object with generations", value: 1 })
        }
        has_one => Ok(has_one.then(|| PrefixDigest::from_bytes(bytes))),
    }
}

/// Reads a byte in which only the bits of `known` may be set.
fn flags(reader: &mut Reader<'_>, field: &'static str, known: u8) -> Result<u8, Malformed> {
    let value = reader.u8()?;
    if value & !known == 0 { Ok(value) } else { Err(Malformed::Unknown { field, value }) }
}

fn write_pin(writer: &mut Writer<'_>, pin: Pin) {
    match pin {
        Pin::Soft => writer.u8(1),
        Pin::Hard(owner) => {
            writer.u8(2);
            writer.u64(owner.0.get());
        }
    }
}

fn read_pin(reader: &mut Reader<'_>, code: u8) -> Result<Pin, Malformed> {
    match code {
        1 => Ok(Pin::Soft),
        2 => Ok(Pin::Hard(read_owner(reader)?)),
        value => Err(Malformed::Unknown { field: "a pin", value }),
    }
}

fn read_owner(reader: &mut Reader<'_>) -> Result<Owner, Malformed> {
    let number = NonZeroU64::new(reader.u64()?);
    number.map(Owner).ok_or(Malformed::Unknown { field: "an owner", value: 0 })
}
