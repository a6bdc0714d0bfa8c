// Why the server did not do what it was asked for.

/** What an answer that is no success says. Errors come as JSON; what stands in between may answer otherwise. */
export async function troubleOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}
